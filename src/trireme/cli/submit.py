"""`trireme submit FILE`: the same run on a cluster, by Slurm or Kubernetes. Renders, checks, shows or submits."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trireme.base.devices import Devices, detect_devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.base.token import TOKEN
from trireme.cli.rl import find_environments
from trireme.config.arguments import HELP, mark_file
from trireme.config.run import RunConfig
from trireme.config.section import as_key, find
from trireme.tools.cluster import kubernetes, slurm
from trireme.tools.cluster.job import Job, Resources, Scheduler, Submission, new_id, submissions_of
from trireme.tools.cluster.node_script import NODE_SCRIPT, RUN_TOML, SECRETS, node_script
from trireme.tools.cluster.nodes import ClusterPlan, plan_nodes
from trireme.tools.cluster.run_file import MOST_GPUS_PER_NODE, check_folder, check_on_machines, run_toml, wanted
from trireme.tools.cluster.secrets import HIDDEN, new_token, read_env_files, write_secrets
from trireme.tools.formats.run_file import TypedRun, read_run_file

PROGRAM = "trireme submit"
_RULE = "-" * 20


@dataclass(frozen=True)
class Prepared:
    """All that was typed, read and checked; nothing is written yet."""

    job: Job
    config: RunConfig
    resources: Resources
    options: Namespace
    secrets: dict[str, str]
    notes: tuple[str, ...]


def submit(argv: list[str]) -> int:
    """Raises: ConfigError where the run is wrong, or the cluster does not take it."""
    parser = _parser()
    if not argv or any(word in HELP for word in argv):
        parser.print_help()
        raise SystemExit(0 if argv else 2)
    file, options, typed = _parse(parser, argv)
    on = _scheduler(options)
    prepared = _prepare(file, options, typed, on)
    return (_on_slurm if on == "slurm" else _on_kubernetes)(prepared)


def _prepare(file: str, options: Namespace, typed: list[str], on: Scheduler) -> Prepared:
    resources = Resources(options.time, options.cpus_per_node, options.memory_per_node)
    typed_run = _read(file, options, typed)
    config = typed_run.config
    machines = wanted(
        config,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        inference_nodes=options.inference_nodes,
    )
    plan = plan_nodes(machines)
    _refuse_part_of_many(resources, plan, on)
    check_on_machines(config, plan, cores=options.cpus_per_node or detect_devices().cores)
    if on == "slurm":
        check_folder(config, plan)
        if not options.python:
            find_environments(config)
    elif not options.image and not options.dry_run:
        raise ConfigError(_no_image())
    secrets = read_env_files(_env_files(typed_run, options)) | {TOKEN: new_token()}
    job = _job(config, plan, file, options, on)
    return Prepared(job, config, resources, options, secrets, tuple(_notes(typed_run, job, on)))


def _read(file: str, options: Namespace, typed: list[str]) -> TypedRun:
    """In any of the formats, for the machines' GPUs, which this one may not have."""
    each = MOST_GPUS_PER_NODE if options.gpus_per_node is None else options.gpus_per_node
    devices = Devices(gpus=tuple(map(str, range(each * (options.nodes or 1)))), cores=1)
    return read_run_file([file, *typed], devices, program=PROGRAM, kinds=("hosted", "flat", "vf-rl", "run"))


def _env_files(typed_run: TypedRun, options: Namespace) -> list[Path]:
    """Beside the run's file, where they are not where the command was typed."""
    beside = [Path(typed_run.file).parent / path for path in typed_run.translation.env_files]
    listed = zip(typed_run.translation.env_files, beside, strict=True)
    return [*(near if not path.exists() and near.exists() else path for path, near in listed), *options.env_file]


def _job(config: RunConfig, plan: ClusterPlan, file: str, options: Namespace, on: Scheduler) -> Job:
    output_dir = kubernetes.on_volume(config.output_dir) if on == "kubernetes" else config.output_dir.absolute()
    run = RunPaths(output_dir / config.name if config.name else output_dir).root
    identity = new_id()
    python = options.python or sys.executable
    return Job(
        id=identity,
        name=config.name or config.paths.root.name or Path(file).stem,
        plan=plan,
        run=run,
        state=submissions_of(run) / identity,
        folder=submissions_of(config.paths.root.absolute()) / identity,
        run_toml=run_toml(config, plan, output_dir=output_dir, origin=file),
        python=python if on == "slurm" else options.python,
        goes_back=config.trainer.ckpt.resume_step is not None,
        restarts=config.supervisor.max_restarts if config.supervisor.restart else 0,
    )


def _refuse_part_of_many(resources: Resources, plan: ClusterPlan, on: Scheduler) -> None:
    """The ports of processes that find each other over the network are the same in every run."""
    if on == "slurm" and not plan.is_single and (resources.cpus_per_node or resources.memory_per_node):
        raise ConfigError(
            f"`--cpus-per-node` or `--memory-per-node` with {len(plan.nodes)} machines - a run on several takes them "
            "whole: another one of yours beside it would want the same ports. Leave the two out."
        )


def _notes(typed_run: TypedRun, job: Job, on: Scheduler) -> Iterator[str]:
    config = typed_run.config
    if config.trainer.ckpt.interval is None:
        yield (
            "`trainer.ckpt.interval` is not set: a job that is started again repeats every step from the journal. "
            "Add `--trainer.ckpt.interval 50`, or the like"
        )
    if on == "slurm" and not job.plan.is_single:
        yield f"{job.run.parent} must be the same folder on all machines; the job looks before it starts anything"


# Slurm


def _on_slurm(prepared: Prepared) -> int:
    job, options = prepared.job, prepared.options
    own = slurm.Options(options.partition, options.account, options.qos, options.sbatch, options.requeues)
    files = {
        RUN_TOML: job.run_toml,
        NODE_SCRIPT: node_script(job),
        slurm.SCRIPT: slurm.batch_script(job, prepared.resources, own, workdir=Path.cwd()),
    }
    if options.dry_run:
        _show(prepared, files)
        print(f"\n{_slurms_answer(files[slurm.SCRIPT])}\nnothing was submitted")
        return 0
    said = slurm.check_submission(files[slurm.SCRIPT])
    _write(job, files)
    write_secrets(job.folder / SECRETS, prepared.secrets)
    try:
        number = slurm.submit(job.folder / slurm.SCRIPT)
    except ConfigError:
        (job.folder / SECRETS).unlink()
        raise
    _record(job, "slurm", number, None)
    _say_submitted(prepared, f"Slurm's job {number}: {said}")
    return 0


def _slurms_answer(script: str) -> str:
    try:
        return f"Slurm says: {slurm.check_submission(script)}"
    except ConfigError as error:
        return f"not ready: {error}"


# Kubernetes


def _on_kubernetes(prepared: Prepared) -> int:
    job, options = prepared.job, prepared.options
    own = _kubernetes_options(options)
    mount = kubernetes.on_volume(prepared.config.output_dir)
    mount = mount if prepared.config.output_dir.is_absolute() else Path(kubernetes.VOLUME)
    script = node_script(job, to_terminal=True)
    made = kubernetes.manifests(job, prepared.resources, own, script, prepared.secrets, mount)
    files = {"manifests.yaml": kubernetes.to_yaml(kubernetes.hide(made))}
    ids = [environment.name or environment.id for environment in prepared.config.orchestrator.env]
    prepared = replace(prepared, notes=(*prepared.notes, *kubernetes.notes(job, own, tuple(ids))))
    if options.dry_run:
        _show(prepared, files)
        print("\nnothing was submitted")
        return 0
    name = kubernetes.submit(job, made, own)
    _write(job, files)
    _record(job, "kubernetes", name, options.namespace)
    _say_submitted(prepared, f"job {name}")
    return 0


def _kubernetes_options(options: Namespace) -> kubernetes.Options:
    if bool(options.volume) == bool(options.storage):
        raise ConfigError(
            "the run needs one volume for its checkpoints, its journal and its logs - expected one of `--volume` and "
            "`--storage`. Write `--volume CLAIM` to use one that exists, or `--storage 500Gi` to make one."
        )
    return kubernetes.Options(
        image=options.image or "IMAGE",
        namespace=options.namespace,
        claim=options.volume,
        storage=options.storage,
        storage_class=options.storage_class,
    )


def _no_image() -> str:
    return (
        "no image was named - expected `--image`, which holds trireme and the run's environments. Build one from "
        "`docker/`, push it to where the cluster gets its images, and write `--image REGISTRY/trireme:TAG`."
    )


# what is written and said


def _write(job: Job, files: dict[str, str]) -> None:
    job.folder.mkdir(mode=0o700, parents=True)
    for name, text in files.items():
        (job.folder / name).write_text(text)


def _record(job: Job, scheduler: Scheduler, number: str, namespace: str | None) -> None:
    Submission(
        id=job.id,
        scheduler=scheduler,
        job=number,
        run=str(job.run),
        processes=job.plan.by_name,
        namespace=namespace,
        folder=job.folder,
    ).write()


def _show(prepared: Prepared, files: dict[str, str]) -> None:
    print("\n".join(_facts(prepared)))
    for name, text in files.items():
        print(f"\n{_RULE} {name} {_RULE}\n{text.rstrip()}")
    print(f"\n{_RULE} secrets {_RULE}")
    print("\n".join(f"{name}={HIDDEN}" for name in prepared.secrets))


def _facts(prepared: Prepared) -> Iterator[str]:
    yield f"run {prepared.job.name}, written to {prepared.job.run}"
    yield from prepared.job.plan.describe()
    yield from (f"note: {note}" for note in prepared.notes)


def _say_submitted(prepared: Prepared, what: str) -> None:
    run = prepared.config.paths.root
    print("\n".join(_facts(prepared)))
    print(f"submitted as {what}")
    print(f"  trireme status {run}\n  trireme logs {run} -f\n  trireme cancel {run}")


# what is typed


def _scheduler(options: Namespace) -> Scheduler:
    """That which was asked for, or whose commands are here."""
    if options.on:
        chosen: Scheduler = options.on
        return chosen
    found: list[Scheduler] = [name for name, room in _SCHEDULERS.items() if room.is_here()]
    if len(found) != 1:
        raise ConfigError(
            f"{'both `sbatch` and `kubectl` are' if found else 'neither `sbatch` nor `kubectl` is'} in PATH - expected "
            "to know which cluster is meant. Write `--on slurm` or `--on kubernetes`."
        )
    return found[0]


_SCHEDULERS: dict[Scheduler, Any] = {"slurm": slurm, "kubernetes": kubernetes}


def _parse(parser: ArgumentParser, argv: list[str]) -> tuple[str, Namespace, list[str]]:
    """The file, our own flags, and those of the run, in any order."""
    options, typed = parser.parse_known_args(argv)
    words = mark_file(typed)
    place = next((place for place, word in enumerate(words) if word.startswith("@")), len(words))
    marked = words[place : place + (2 if words[place : place + 1] == ["@"] else 1)]
    typed = [*words[:place], *words[place + len(marked) :]]
    _suggest(parser, typed)
    if not (file := "".join(marked)[1:]):
        raise ConfigError(
            f"no file was given - expected the file of the run. Write `{PROGRAM} configs/reverse-text/rl.toml "
            f"{' '.join(argv)}`."
        )
    return file, options, typed


def _suggest(parser: ArgumentParser, typed: list[str]) -> None:
    """One of our own flags, misspelt, is not looked for among the run's keys."""
    ours = [flag for action in parser._actions for flag in action.option_strings]
    for word in typed:
        flag = word.partition("=")[0]
        path = tuple(flag.removeprefix("--").replace("-", "_").split("."))
        near = get_close_matches(flag, ours, n=1, cutoff=0.8)
        if flag.startswith("--") and near and find(RunConfig, path) is None:
            raise ConfigError(
                f"unknown flag `{flag}` - it is none of `{PROGRAM}`, and `{as_key(path)}` is no key of a run. Did you "
                f"mean `{near[0]}`?"
            )


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} FILE [--on slurm|kubernetes] [options] [--key value …]",
        description="Submits a run to a cluster: one job, in which one machine runs `rl`, and several the inference "
        "servers, the orchestrator and the trainer's ranks, each at its place. FILE is one of `rl`, of `prime-rl` or "
        "`vf-rl`, or of hosted training; its keys can be given as flags, too.",
        epilog="Then: `trireme status RUN`, `trireme logs RUN -f`, `trireme cancel RUN`.",
        allow_abbrev=False,
    )
    parser.add_argument("--on", choices=tuple(_SCHEDULERS), help="whichever has its commands here, where not given")
    parser.add_argument("--dry-run", action="store_true", help="show all that would be submitted; submit nothing")
    parser.add_argument(
        "--env-file", action="append", type=Path, default=[], metavar="FILE", help="more secrets: lines NAME=value"
    )
    _add_machines(parser)
    _add_slurm(parser)
    _add_kubernetes(parser)
    return parser


def _add_machines(parser: ArgumentParser) -> None:
    machines = parser.add_argument_group("machines")
    machines.add_argument("--nodes", type=int, metavar="N", help="as many as the run's GPUs take, where not given")
    machines.add_argument("--gpus-per-node", type=int, metavar="N", help="0 runs on CPUs")
    machines.add_argument("--inference-nodes", type=int, metavar="N", help="for engines; half of them where not given")
    machines.add_argument("--time", metavar="LIMIT", help="as Slurm writes it: 90 (minutes), 12:00:00, 2-00:00:00")
    machines.add_argument("--cpus-per-node", type=int, metavar="N", help="all where not given")
    machines.add_argument("--memory-per-node", metavar="SIZE", help="500G; all where not given")


def _add_slurm(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Slurm")
    group.add_argument("--partition", metavar="NAME", help="Slurm's default where not given")
    group.add_argument("--account", metavar="NAME")
    group.add_argument("--qos", metavar="NAME")
    group.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="any other: --sbatch=--constraint=h100"
    )
    group.add_argument(
        "--requeues", type=int, default=20, metavar="N", help="how often it goes on after its time was up; 20"
    )
    group.add_argument("--python", metavar="PATH", help="the interpreter on the machines; this one's where not given")


def _add_kubernetes(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Kubernetes")
    group.add_argument("--image", metavar="NAME", help="holds trireme and the run's environments; see docker/")
    group.add_argument("--namespace", metavar="NAME", help="kubectl's own where not given")
    group.add_argument("--volume", metavar="CLAIM", help="a volume claim that exists, for the run's folder")
    group.add_argument("--storage", metavar="SIZE", help="or make one of this size: 500Gi")
    group.add_argument("--storage-class", metavar="NAME", help="of that one")
