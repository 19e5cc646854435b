"""Submit a run to a cluster: render, check, show or submit it, and write the record of it."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path

from trireme.base.devices import Devices, detect_devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.base.token import TOKEN
from trireme.config.arguments import mark_file
from trireme.config.run import RunConfig
from trireme.orchestrator.environments.venv import find_environment
from trireme.tools.cluster import kubernetes, slurm
from trireme.tools.cluster.job import (
    NODE_SCRIPT,
    RUN_TOML,
    SECRETS,
    Job,
    Scheduler,
    Submission,
    SubmitOptions,
    node_script,
    read_env_files,
    submissions_of,
    write_secrets,
)
from trireme.tools.cluster.nodes import ClusterPlan, plan_nodes
from trireme.tools.cluster.run_file import MAX_GPUS_PER_NODE, check_folder, check_on_machines, machines_wanted, run_toml
from trireme.tools.formats.run_file import read_run_file

PROGRAM = "trireme submit"
HIDDEN = "(hidden)"
_RULE = "-" * 20


def submit_run(words: list[str], options: SubmitOptions) -> None:
    """Submit the run, or show what would be submitted where `options.dry_run` is set.

    Args:
        words: the run's file and its flags, as typed.

    Raises: ConfigError where the run is wrong, or the cluster rejects it.
    """
    words = mark_file(words)
    at = next((place for place, word in enumerate(words) if word.startswith("@")), 0)
    words = [*words[at:], *words[:at]]  # a flag without a value would else take the file for its value
    count = (MAX_GPUS_PER_NODE if options.gpus_per_node is None else options.gpus_per_node) * (options.nodes or 1)
    devices = Devices(gpus=tuple(map(str, range(count))), cores=1)  # of the cluster; this machine may have none
    typed = read_run_file(words, devices, program=PROGRAM, kinds=("hosted", "flat", "vf-rl", "run"))
    config = typed.config
    on = options.on or _scheduler_here()
    plan = plan_nodes(machines_wanted(config, options))
    options.check(on, len(plan.nodes))
    check_on_machines(config, plan, cores=options.cpus_per_node or detect_devices().cores)
    environments = [environment.id for environment in config.orchestrator.env]
    if on == "slurm":
        check_folder(config, plan)
        for environment in () if options.python else environments:
            find_environment(environment)
    here = Path(typed.file).parent  # where secrets are looked for too
    named = [Path(file) for file in typed.translation.env_files]
    env_files = [here / file if not file.exists() and (here / file).exists() else file for file in named]
    variables = read_env_files([*env_files, *options.env_file]) | {TOKEN: secrets.token_urlsafe(32)}
    job = _job(config, plan, typed.file, options, on)
    print(f"run {job.name}, written to {job.run}", *plan.describe(), sep="\n")
    if config.trainer.ckpt.interval is None:
        print(
            "note: `trainer.ckpt.interval` is not set: a job that is restarted repeats every step from the journal. "
            "Add `--trainer.ckpt.interval 50`, or the like"
        )
    submit = _submit_to_slurm if on == "slurm" else _submit_to_kubernetes
    submitted = submit(job, config, options, variables)
    if submitted is None:
        print("nothing was submitted")
        return
    run = config.paths.root
    print(f"submitted as {submitted}\n  trireme status {run}\n  trireme logs {run} -f\n  trireme cancel {run}")


def _scheduler_here() -> Scheduler:
    """Return the one scheduler whose commands are in PATH."""
    has_slurm, has_kubernetes = slurm.is_here(), kubernetes.is_here()
    if has_slurm != has_kubernetes:
        return "slurm" if has_slurm else "kubernetes"
    raise ConfigError(
        f"{'both `sbatch` and `kubectl` are' if has_slurm else 'neither `sbatch` nor `kubectl` is'} in PATH - expected "
        "exactly one, or to be told which cluster is meant. Write `--on slurm` or `--on kubernetes`."
    )


def _job(config: RunConfig, plan: ClusterPlan, file: str, options: SubmitOptions, on: Scheduler) -> Job:
    output_dir = kubernetes.on_volume(config.output_dir) if on == "kubernetes" else config.output_dir.absolute()
    run = RunPaths(output_dir / config.name if config.name else output_dir).root
    identity = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return Job(
        id=identity,
        name=config.name or config.paths.root.name or Path(file).stem,
        plan=plan,
        run=run,
        state=submissions_of(run) / identity,
        folder=submissions_of(config.paths.root.absolute()) / identity,
        run_toml=run_toml(config, plan, output_dir=output_dir, origin=file),
        python=options.python or (sys.executable if on == "slurm" else None),
        goes_back=config.trainer.ckpt.resume_step is not None,
        restarts=config.supervisor.max_restarts if config.supervisor.restart else 0,
    )


def _submit_to_slurm(job: Job, config: RunConfig, options: SubmitOptions, variables: dict[str, str]) -> str | None:
    """Return what was submitted, or None after a dry run."""
    if not job.plan.is_single:
        print(f"note: {job.run.parent} must be the same folder on all machines; the job checks that before it starts")
    script = slurm.batch_script(job, options, workdir=Path.cwd())
    files = {RUN_TOML: job.run_toml, NODE_SCRIPT: node_script(job), slurm.SCRIPT: script}
    if options.dry_run:
        _show(files, variables)
        try:
            print(f"\nSlurm says: {slurm.check_submission(script)}")
        except ConfigError as error:
            print(f"\nnot ready: {error}")
        return None
    answer = slurm.check_submission(script)
    _write(job, files)
    write_secrets(job.folder / SECRETS, variables)
    try:
        number = slurm.submit(job.folder / slurm.SCRIPT)
    except ConfigError:
        (job.folder / SECRETS).unlink()
        raise
    _record(job, "slurm", number)
    return f"Slurm's job {number}: {answer}"


def _submit_to_kubernetes(job: Job, config: RunConfig, options: SubmitOptions, variables: dict[str, str]) -> str | None:
    """Return what was submitted, or None after a dry run. The manifests that are shown and kept have no secrets."""
    environments = ", ".join(environment.name or environment.id for environment in config.orchestrator.env)
    print(f"note: the image {options.image or 'IMAGE'} must hold trireme and the environments {environments}")
    if not job.plan.is_single:
        volume = options.volume or kubernetes.name_of(job)
        print(f"note: the volume {volume} must be one that several pods can write to (ReadWriteMany)")
    mount = config.output_dir if config.output_dir.is_absolute() else Path(kubernetes.VOLUME)
    hidden = kubernetes.manifests(job, options, dict.fromkeys(variables, HIDDEN), mount)
    if options.dry_run:
        _show({"manifests.yaml": hidden}, variables)
        return None
    name = kubernetes.submit(job, kubernetes.manifests(job, options, variables, mount), options.namespace)
    _write(job, {"manifests.yaml": hidden})
    _record(job, "kubernetes", name, options.namespace)
    return f"job {name}"


def _show(files: dict[str, str], variables: dict[str, str]) -> None:
    hidden = "\n".join(f"{name}={HIDDEN}" for name in variables)
    for name, text in (files | {"secrets": hidden}).items():
        print(f"\n{_RULE} {name} {_RULE}\n{text.rstrip()}")


def _write(job: Job, files: dict[str, str]) -> None:
    job.folder.mkdir(mode=0o700, parents=True)
    for name, text in files.items():
        (job.folder / name).write_text(text)


def _record(job: Job, scheduler: Scheduler, number: str, namespace: str | None = None) -> None:
    processes = job.plan.by_name
    Submission(job.id, scheduler, number, str(job.run), processes, namespace, folder=job.folder).write()
