"""Submit a run to a cluster: render, check, show or submit it, and write the record of it.

The machines load the run as it was typed and derive the rest themselves. It is checked here as each of them will.
"""

from __future__ import annotations

import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from trireme.base.devices import Devices, detect_devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.base.token import TOKEN
from trireme.config.arguments import mark_file
from trireme.config.files import to_table, to_toml
from trireme.config.problems import raise_together
from trireme.config.resolve import resolve, updated
from trireme.config.rules import check, file_problems, problems
from trireme.config.run import RunConfig
from trireme.config.section import NONE, Section
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
from trireme.tools.formats.run_file import read_run_file

PROGRAM = "trireme submit"
HIDDEN = "(hidden)"
_RULE = "-" * 20

MAX_GPUS_PER_NODE = 8  # of a machine whose number of GPUs the user does not give
_SPLIT = ("inference_gpus", "trainer_gpus", "inference_gpu_ids", "trainer_gpu_ids")


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
    plan = plan_of(config, options)
    options.check(on, plan.num_nodes)
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
    table = _given(config) | {"output_dir": str(output_dir), "device": "cuda" if plan.gpus_per_node else "cpu"}
    if not plan.is_single:
        table = {key: value for key, value in table.items() if key not in (*_SPLIT, "hosts")}
    return Job(
        id=identity,
        name=config.name or config.paths.root.name or Path(file).stem,
        plan=plan,
        run=run,
        state=submissions_of(run) / identity,
        folder=submissions_of(config.paths.root.absolute()) / identity,
        run_toml=f"# {file}, as it was submitted\n\n{to_toml(table)}",
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
    Submission(job.id, "slurm", number, str(job.run), job.plan.by_name, folder=job.folder).write()
    return f"Slurm's job {number}: {answer}"


def _submit_to_kubernetes(job: Job, config: RunConfig, options: SubmitOptions, variables: dict[str, str]) -> str | None:
    """Return what was submitted, or None after a dry run. The manifests that are shown and kept have no secrets."""
    environments = ", ".join(environment.resolved_name for environment in config.orchestrator.env)
    print(f"note: the image {options.image or 'IMAGE'} must hold trireme and the environments {environments}")
    if not job.plan.is_single:
        volume = options.volume or kubernetes.name_of(job)
        print(f"note: the volume {volume} must be one that several pods can write to (ReadWriteMany)")
    mount = config.output_dir if config.output_dir.is_absolute() else Path(kubernetes.VOLUME)
    if job.run == mount:
        raise ConfigError(
            f"`output_dir` is {config.output_dir} and the run has no `name`, so that its folder is {mount}, where the "
            "volume is mounted - expected a folder inside of the volume: the state of the submission lies next to it. "
            "Add `--name NAME`."
        )
    hidden = kubernetes.manifests(job, options, dict.fromkeys(variables, HIDDEN), mount)
    if options.dry_run:
        _show({"manifests.yaml": hidden}, variables)
        return None
    name, processes = kubernetes.name_of(job), job.plan.by_name
    record = Submission(job.id, "kubernetes", name, str(job.run), processes, options.namespace, folder=job.folder)
    _write(job, {"manifests.yaml": hidden}, record)  # first: without it no command would find the job
    try:
        kubernetes.submit(job, kubernetes.manifests(job, options, variables, mount), options.namespace)
    except ConfigError:
        shutil.rmtree(job.folder)
        raise
    return f"job {name}"


def _show(files: dict[str, str], variables: dict[str, str]) -> None:
    hidden = "\n".join(f"{name}={HIDDEN}" for name in variables)
    for name, text in (files | {"secrets": hidden}).items():
        print(f"\n{_RULE} {name} {_RULE}\n{text.rstrip()}")


def _write(job: Job, files: dict[str, str], record: Submission | None = None) -> None:
    """Raises: ConfigError where the submission's folder cannot be written."""
    try:
        job.folder.mkdir(mode=0o700, parents=True)
        for name, text in files.items():
            (job.folder / name).write_text(text)
        if record is not None:
            record.write()
    except OSError as error:
        raise ConfigError(
            f"{job.folder} could not be written ({error}) - expected a folder for the record of the submission, next "
            "to that of the run. Nothing was submitted. Free some space, or change `output_dir`: one that is relative "
            "lies in this folder here, and on the volume in Kubernetes."
        ) from error


def _given(value: Any) -> Any:
    """Return the values that the user gave. Defaults are left out, as some are derived where nothing was given."""
    if isinstance(value, Section):
        names = [name for name in type(value).model_fields if name in value.model_fields_set]
        return {name: _given(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [_given(item) for item in value]
    return NONE if value is None else to_table(value)


def plan_of(config: RunConfig, options: SubmitOptions) -> ClusterPlan:
    """Choose how many machines of how many GPUs the run takes, and what runs where.

    Raises: ConfigError where nothing says how many GPUs a machine has, where the run places itself, or where the GPUs
        do not divide over the machines.
    """
    nodes, gpus_per_node = options.nodes, options.gpus_per_node
    if "hosts" in config.model_fields_set:
        raise ConfigError(
            "the run has a table `[hosts]` - expected none: the cluster chooses the machines, and their "
            "addresses are filled in then. Remove the table, or start the processes yourself."
        )
    if (nodes or 1) > 1 and (config.inference_gpu_ids is not None or config.trainer_gpu_ids is not None):
        raise ConfigError(
            f"inference_gpu_ids or trainer_gpu_ids was given, with `--nodes {nodes}` - GPUs of several machines are "
            "dealt out by number. Write `inference_gpus` and `trainer_gpus`, counted over all machines."
        )
    ids = {*(config.inference_gpu_ids or ()), *(config.trainer_gpu_ids or ())}
    asked = max(len(ids), (config.inference_gpus or 0) + (config.trainer_gpus or 0))  # over all machines
    if gpus_per_node is None and config.device == "cpu":
        gpus_per_node = 0
    elif gpus_per_node is None and asked:
        gpus_per_node = min(MAX_GPUS_PER_NODE, -(-asked // (nodes or 1)))
    elif gpus_per_node is None:
        raise ConfigError(
            "nothing says how many GPUs each machine has - expected `--gpus-per-node`, or GPUs in the run itself. "
            "Write `--gpus-per-node 8`, or 0 to run on CPUs."
        )
    if nodes is None:
        nodes = max(1, -(-asked // gpus_per_node)) if gpus_per_node else 1
    limits = (("--nodes", nodes, 1), ("--gpus-per-node", gpus_per_node, 0))
    raise_together(
        [
            f"`{flag} {number}` - expected {least} or more. Write `{flag} {max(least, 1)}`, or leave it out."
            for flag, number, least in limits
            if number < least
        ]
    )
    if nodes == 1 and asked > gpus_per_node:
        raise ConfigError(
            f"the run asks for {asked} GPUs, and its one machine has {gpus_per_node} - expected that to be enough. "
            f"Write `--nodes {-(-asked // gpus_per_node) if gpus_per_node else 2}`, or raise `--gpus-per-node`."
        )
    return plan_nodes(
        nodes,
        gpus_per_node,
        inference_gpus=config.inference_gpus,
        trainer_gpus=config.trainer_gpus,
        inference_nodes=options.inference_nodes,
        tp=config.inference.parallel.tp if gpus_per_node else 1,
    )


def check_on_machines(config: RunConfig, plan: ClusterPlan, *, cores: int) -> None:
    """Check the run as each of its machines will.

    Raises: ConfigError with the problems of all machines.
    """
    devices = Devices(gpus=tuple(map(str, range(plan.gpus_per_node))), cores=cores)
    config = updated(config, {"device": "cuda" if plan.gpus_per_node else "cpu"})
    if plan.is_single:
        check(resolve(config, devices), devices)
        return
    addresses = [
        f"10.99.0.{machine + 1}" for machine in range(plan.num_nodes)
    ]  # in place of those that the machines will have
    hosts = {
        "hosts.inference": tuple(addresses[index] for index in plan.machines_of("inference")),
        "hosts.orchestrator": addresses[plan.leader],
        "hosts.trainer": tuple(addresses[index] for index in plan.machines_of("trainer")),
    }
    config = updated(config, dict.fromkeys(_SPLIT) | hosts)
    found: list[str] = []
    for process in plan.processes:
        own = updated(config, {f"{process.kind}_gpu_ids": process.gpus}) if process.gpus else config
        resolved = resolve(own, devices, section=process.kind, node=process.place)
        found += problems(resolved, devices, section=process.kind)
    raise_together(found)


def check_folder(config: RunConfig, plan: ClusterPlan) -> None:
    """Check the model, the environments' files and the run's folder, which the machines share with this one.

    Raises: ConfigError.
    """
    gpus = tuple(map(str, range(MAX_GPUS_PER_NODE))) if config.device == "cuda" else ()
    raise_together(file_problems(resolve(config, Devices(gpus=gpus, cores=1))))
    paths = config.paths
    if config.resume and not paths.holds_run and not paths.run_config.exists():
        raise ConfigError(
            f"`--resume` was given, and there is no run in {paths.root} - expected one to resume. Leave it out to "
            "start a new run, or check `output_dir` and `name`."
        )
    if paths.holds_run and not plan.is_single and not config.resume and config.trainer.ckpt.resume_step is None:
        raise ConfigError(
            f"{paths.root} holds a run already - expected an empty folder: several machines cannot agree on when to "
            "move it aside. Add --resume to resume it, or take another name: `--name another`."
        )
