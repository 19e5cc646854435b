"""`trireme submit FILE`: render a run for a cluster, check it, show or submit it, and write the record of it.

The machines load the run as it was typed and derive the rest themselves. It is checked here as each of them will.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from argparse import ArgumentParser
from collections.abc import Collection, Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from trireme.base.devices import Devices, detect_devices
from trireme.base.errors import ConfigError
from trireme.base.safe_text import CONTROL
from trireme.base.token import TOKEN
from trireme.config.arguments import HELP, count, mark_file
from trireme.config.files import to_toml, toml_value
from trireme.config.problems import raise_together
from trireme.config.resolve import resolve, updated
from trireme.config.rules.check import check, problems
from trireme.config.rules.machines import file_problems
from trireme.config.run import RunConfig
from trireme.config.section import find
from trireme.launch.folder import check_folder
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
from trireme.tools.cluster.nodes import MAX_GPUS_PER_NODE, ClusterPlan, plan_nodes
from trireme.tools.formats.run_file import TypedRun, read_run_file

PROGRAM = "trireme submit"
HIDDEN = "(hidden)"
_RULE = "-" * 20

_SPLIT = ("inference_gpus", "trainer_gpus", "inference_gpu_ids", "trainer_gpu_ids")


def command(argv: list[str]) -> int:
    """Submit a run, and return the exit code.

    Raises: ConfigError if the run is wrong, or the cluster rejects it.
    """
    parser = ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} FILE [--on slurm|kubernetes] [options] [--key value …]",
        description="Submits a run to a cluster as one job. A single machine runs `rl`. Several run the inference "
        "servers, the orchestrator and the trainer's ranks. FILE is one of `rl`, of `prime-rl` or `vf-rl`, or of "
        "hosted training; its keys can be given as flags, too.",
        epilog="Then: `trireme status RUN`, `trireme logs RUN -f`, `trireme cancel RUN`.",
        allow_abbrev=False,
    )

    # One flag per field, so that a new option of `submit` is one line in its class.
    for name, field in SubmitOptions.model_fields.items():
        settings: dict[str, Any] = {"help": field.description, "default": field.default}
        if name == "on":
            settings["choices"] = get_args(Scheduler)
        elif isinstance(field.default, bool):
            settings["action"] = "store_true"
        elif isinstance(field.default, tuple):
            settings |= {"action": "append", "default": []}
        elif "int" in str(field.annotation):
            settings["type"] = count
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)

    if not argv or any(word in HELP for word in argv):
        parser.print_help()
        raise SystemExit(0 if argv else 2)

    # What is left are keys of the run. A misspelt option of `submit` would pass as one, so look for near names.
    options, words = parser.parse_known_args(argv)
    flags = [f"--{name.replace('_', '-')}" for name in SubmitOptions.model_fields]
    for word in words:
        flag = word.partition("=")[0]
        near = get_close_matches(flag, flags, n=1, cutoff=0.8) if flag.startswith("--") else []
        if near and find(RunConfig, tuple(flag.removeprefix("--").replace("-", "_").split("."))) is None:
            raise ConfigError(f"unknown flag `{flag}` - it is no key of a run either. Did you mean `{near[0]}`?")

    submit_run(words, SubmitOptions(**vars(options)))
    return 0


def submit_run(words: list[str], options: SubmitOptions) -> None:
    """Submit the run, or show what would be submitted if `options.dry_run` is set.

    Args:
        words: the run's file and its flags, as typed.

    Raises: ConfigError if the run is wrong, or the cluster rejects it.
    """
    # a flag without a value would otherwise take the file for its value
    words = mark_file(words)
    at = next((place for place, word in enumerate(words) if word.startswith("@")), 0)
    words = [*words[at:], *words[:at]]
    num_gpus = (MAX_GPUS_PER_NODE if options.gpus_per_node is None else options.gpus_per_node) * (options.nodes or 1)
    devices = Devices(gpus=tuple(map(str, range(num_gpus))), cores=1)  # the cluster's; this machine may have none
    typed = read_run_file(words, devices, program=PROGRAM, kinds=("hosted", "flat", "vf-rl", "run"))
    # Flags of `vf-rl` and `prime-rl` that only show or place something must not submit a job.
    if typed.command.given():
        raise ConfigError(
            f"{', '.join(typed.command.given())} has no meaning for a job - expected flags of `submit` and keys of the "
            "run. `--dry-run` shows every script; `uv run prime-rl FILE --print-config` shows what became of each key."
        )
    config = typed.config

    on = options.on or _scheduler_here()
    plan = plan_nodes(
        config,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        inference_nodes=options.inference_nodes,
    )
    options.check(on, plan.num_nodes)

    check_on_machines(config, plan, cores=options.cpus_per_node or detect_devices().cores)
    # machines of a Slurm cluster share the file system and this folder, so mistakes in files show here already
    if on == "slurm":
        check_shared(config, plan)
        for environment in () if options.python else config.orchestrator.env:
            find_environment(environment.id)
    # files of secrets are also looked for next to the run's file
    here = Path(typed.file).parent
    named = typed.env_files
    env_files = [here / file if not file.exists() and (here / file).exists() else file for file in named]
    # the processes of a run authenticate each other by a token of this submission
    variables = read_env_files([*env_files, *options.env_file]) | {TOKEN: secrets.token_urlsafe(32)}

    job = _job(typed, plan, options, on)
    print(f"run {job.name}, written to {job.run}", *plan.describe(), *_notes(job, config, on), sep="\n")
    files = _render(job, options, variables, on)
    if options.dry_run:
        _show(files, variables, on)
        return

    name = _submit(job, files, options, variables, on)
    run = config.paths.root
    print(f"submitted to {on} as {name}\n  trireme status {run}\n  trireme logs {run} -f\n  trireme cancel {run}")


def _scheduler_here() -> Scheduler:
    """Return the one scheduler whose commands are in PATH."""
    commands: dict[Scheduler, str] = {"slurm": "sbatch", "kubernetes": "kubectl"}
    found = [scheduler for scheduler, command in commands.items() if shutil.which(command)]
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"{'both `sbatch` and `kubectl` are' if found else 'neither `sbatch` nor `kubectl` is'} in PATH - expected "
        "exactly one, or to be told which cluster is meant. Write `--on slurm` or `--on kubernetes`."
    )


def _job(typed: TypedRun, plan: ClusterPlan, options: SubmitOptions, on: Scheduler) -> Job:
    """Return the job of a run, with its configuration as it was typed and its folders as the machines see them.

    Raises: ConfigError if the run's folder would not be inside of the volume of Kubernetes.
    """
    # the machines see the run's folder under another path than this one does if it lies on a volume
    config, root = typed.config, typed.config.paths.root.absolute()
    output_dir, run = config.output_dir.absolute(), root
    if on == "kubernetes":
        output_dir = Path(os.path.normpath(Path(kubernetes.MOUNT, config.output_dir)))
        run = output_dir / config.name if config.name else output_dir
        if Path(kubernetes.MOUNT) not in run.parents:
            raise ConfigError(
                f"the run's folder would be {run} - expected one inside of {kubernetes.MOUNT}, where the volume is "
                "mounted. Give a relative `output_dir`, or add `--name NAME`."
            )
    # a requeued job finds its own marks by this name, and names sort by time
    identity = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    table = typed.table | {"output_dir": str(output_dir), "device": "cuda" if plan.gpus_per_node else "cpu"}
    # with several machines, `plan_nodes` has placed the processes: each takes whole machines
    if not plan.is_single:
        table = {key: value for key, value in table.items() if key not in _SPLIT}

    return Job(
        id=identity,
        name=config.name or root.name or Path(typed.file).stem,
        plan=plan,
        run=run,
        state=submissions_of(run) / identity,
        folder=submissions_of(root) / identity,
        run_toml=f"# {typed.file}, as it was submitted\n\n{to_toml(table)}",
        python=options.python or (sys.executable if on == "slurm" else None),
        goes_back=config.trainer.ckpt.resume_step is not None,
        restarts=config.supervisor.max_restarts if config.supervisor.restart else 0,
    )


def _notes(job: Job, config: RunConfig, on: Scheduler) -> Iterator[str]:
    if config.trainer.ckpt.interval is None:
        yield (
            "note: `trainer.ckpt.interval` is not set: a job that is restarted repeats every step from the journal. "
            "Add `--trainer.ckpt.interval 50`, or the like"
        )
    if on == "kubernetes":
        environments = ", ".join(environment.resolved_name for environment in config.orchestrator.env)
        yield f"note: the image must hold trireme and the environments {environments}"
        if not job.plan.is_single:
            yield "note: the volume must be one that several pods can write to (ReadWriteMany)"
    elif not job.plan.is_single:
        yield f"note: {job.run.parent} must be the same folder on all machines; the job checks that before it starts"


def _render(job: Job, options: SubmitOptions, variables: Collection[str], on: Scheduler) -> dict[str, str]:
    """Return the files that are shown and kept, without the values of the variables."""
    if on == "kubernetes":
        return {"manifests.yaml": kubernetes.manifests(job, options, dict.fromkeys(variables, HIDDEN))}
    script = slurm.batch_script(job, options, workdir=Path.cwd())
    return {RUN_TOML: job.run_toml, NODE_SCRIPT: node_script(job), slurm.SCRIPT: script}


def _show(files: dict[str, str], variables: Collection[str], on: Scheduler) -> None:
    hidden = "\n".join(f"{name}={HIDDEN}" for name in variables)
    for name, text in (files | {"secrets": hidden}).items():
        print(f"\n{_RULE} {name} {_RULE}\n{text.rstrip()}")
    if on == "slurm":
        try:
            print(f"\nSlurm says: {slurm.check_submission(files[slurm.SCRIPT])}")
        except ConfigError as error:
            print(f"\nnot ready: {error}")
    print("nothing was submitted")


def _submit(job: Job, files: dict[str, str], options: SubmitOptions, variables: dict[str, str], on: Scheduler) -> str:
    """Write the submission's folder, submit the job, and return its name.

    Raises: ConfigError if the folder cannot be written, or the cluster rejects the job. The folder is removed then.
    """
    # the folder is private, as the secrets lie in it
    try:
        job.folder.mkdir(mode=0o700, parents=True)
        for file, text in files.items():
            (job.folder / file).write_text(text)
    except OSError as error:
        raise ConfigError(
            f"{job.folder} could not be written ({error}) - expected a folder for the record of the submission, next "
            "to that of the run. Nothing was submitted. Free some space, or change `output_dir`: one that is relative "
            "lies in this folder here, and on the volume in Kubernetes."
        ) from error

    submission = Submission(job.id, on, kubernetes.name_of(job), str(job.run), options.namespace, folder=job.folder)
    try:
        if on == "slurm":
            write_secrets(job.folder / SECRETS, variables)
            submission = replace(submission, job=slurm.submit(files[slurm.SCRIPT]))
            submission.write()
        else:
            submission.write()  # first: without the record no command would find the job
            kubernetes.submit(submission, kubernetes.manifests(job, options, variables))
    # a scheduler that did not answer may have taken the job, so only a rejected one loses its folder
    except ConfigError:
        shutil.rmtree(job.folder)
        raise
    return submission.job


def check_on_machines(config: RunConfig, plan: ClusterPlan, *, cores: int) -> None:
    """Check the run as each of its machines will.

    Raises: ConfigError with the problems of all machines.
    """
    devices = Devices(gpus=tuple(map(str, range(plan.gpus_per_node))), cores=cores)

    config = updated(config, {"device": "cuda" if plan.gpus_per_node else "cpu"})
    if plan.is_single:
        check(resolve(config, devices), devices)
        return
    addresses = [f"10.99.0.{machine + 1}" for machine in range(plan.num_nodes)]  # stand-ins for the real ones
    hosts = {f"hosts.{kind}": tuple(addresses[each] for each in machines) for kind, machines in plan.machines.items()}
    config = updated(config, dict.fromkeys(_SPLIT) | hosts | {"hosts.orchestrator": addresses[plan.leader]})

    found: list[str] = []
    for kind in plan.machines:  # machines of a kind differ in their address alone
        found += problems(resolve(config, devices, section=kind), devices, section=kind)
    raise_together(found)


def check_shared(config: RunConfig, plan: ClusterPlan) -> None:
    """Check this folder, the model, the environments' files and the run's folder, which the machines share.

    Raises: ConfigError.
    """
    # the path of this folder becomes part of a line of the script
    if CONTROL.search(here := os.getcwd()):
        raise ConfigError(
            f"this folder is {toml_value(here)}, with control characters - expected a path without any, as the job "
            "runs there. Rename it."
        )

    # the machines' GPUs are not known here, and these checks do not depend on their number
    gpus = tuple(map(str, range(MAX_GPUS_PER_NODE))) if config.device == "cuda" else ()
    raise_together(file_problems(resolve(config, Devices(gpus=gpus, cores=1))))
    check_folder(config)

    paths = config.paths
    if paths.holds_run and not plan.is_single and not config.resume and config.trainer.ckpt.resume_step is None:
        raise ConfigError(
            f"{paths.root} holds a run already - expected an empty folder: several machines cannot agree on when to "
            "move it aside. Add --resume to resume it, or take another name: `--name another`."
        )
