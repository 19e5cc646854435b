"""What every command does around its own work: errors become one message and an exit code, ranks get started."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trireme.base.devices import Devices, detect_devices
from trireme.base.disk import is_full
from trireme.base.errors import FINAL_EXIT_CODES, ConfigError, TriremeError
from trireme.base.installation import correct_wheel_tag
from trireme.base.paths import RunPaths
from trireme.base.processes import die_with_parent, free_port
from trireme.cli.machines import KEEPER, Nodes, join_network, node_of
from trireme.config.arguments import HELP
from trireme.config.files import ProcessName, write_rooms, write_run
from trireme.config.load import load_run_config
from trireme.config.orchestrator import sampling_notes
from trireme.config.resolve import resolve, updated
from trireme.config.rules import check, check_launch, launch_problems
from trireme.config.run import NODE, RunConfig
from trireme.launch.folder import prepare_folder
from trireme.launch.plan import describe, plan
from trireme.launch.process_tree import MARKER
from trireme.launch.ranks import run_ranks
from trireme.launch.resume import check_resume

RANKS_PARENT = "TRIREME_RANKS_PARENT"  # pid of the process that starts the ranks, for the ranks below it

REFUSED = (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""Files and folders that are not ours to have: the user can put that right, and no traceback helps."""

A_PLACE = (
    "a place that this user may write to, or a file that may be read. Look at its rights, or choose another: "
    "`output_dir` is where runs are written."
)
ROOM = "room where its output goes. Free some space there, or send it elsewhere."


@dataclass(frozen=True)
class Opened:
    """A process's configuration, and the file from which another process can load exactly the same."""

    config: RunConfig
    run_file: Path


def run_door(program: str, main: Callable[[list[str]], int | None], *, abruptly: bool = False) -> NoReturn:
    """Ends the process: 0, or 2 for what the user can put right, or 1; a deliberate error has no traceback.

    Args:
        abruptly: without Python's own farewell. Threads of gloo may then still be letting go of tensors; when the
            interpreter ends under one of them, the process aborts with "terminate called without an active exception".
    """
    correct_wheel_tag()
    if any(word in HELP for word in sys.argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `rl --help | head` ends quietly
    try:
        code = main(sys.argv[1:]) or 0
    except TriremeError as error:
        if logging.getLogger("trireme").isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        print(f"{program}: {error}", file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE
    except OSError as error:
        if not (is_full(error) if error.filename is None else error.errno in REFUSED):
            raise
        code = _refused(program, error)
    except KeyboardInterrupt:
        code = 130
    code = _said_all(program, code)
    sys.stderr.flush()
    if abruptly:
        os._exit(code)
    sys.exit(code)


def _refused(program: str, error: OSError) -> int:
    """A file or folder that is not ours to have, or standard output where its disk is full."""
    what, expected = (
        (error.filename, A_PLACE) if error.filename is not None else ("what it says cannot be written", ROOM)
    )
    print(f"{program}: {what}: {error.strerror} - expected {expected}", file=sys.stderr)
    return ConfigError.exit_code


def _said_all(program: str, code: int) -> int:
    """What is printed may have lost its reader (`rl @ FILE --dry-run | head`), or its place."""
    try:
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE
    except OSError as error:
        if not is_full(error):
            raise
        code = code or _refused(program, error)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would try once more
    return code


def open_process(room: ProcessName, argv: list[str]) -> Opened | None:
    """The configuration of a process, started by `rl` or alone; None where it was only to be shown.

    Everything that must happen before heavy imports happens here: environment variables, and the tie to the parent.
    """
    config, invocation = load_run_config(argv, section=room, program=room)
    if invocation.run:
        end_with_parent()
        join_network(config, room, int(os.environ.get(NODE, 0)))
        return Opened(config if _is_rank_of_one_alone() else going_on(config), invocation.run)
    devices = detect_devices()
    node = node_of(config, room, invocation)
    config = resolve(config, devices, section=room, node=node)
    check(config, devices, section=room)
    if invocation.dry_run:
        if show(config, devices, room):
            sys.exit(ConfigError.exit_code)
        return None
    check_launch(config, devices, section=room)
    if room != "inference":
        check_resume(config)
    join_network(config, room, node)
    run_file = config.paths.configs / (f"{room}-{node}.json" if node else f"{room}.json")
    write_run(config, run_file)
    if room == "orchestrator":
        from trireme.cli.surroundings import note_surroundings  # what it reads, other rooms need not load

        note_surroundings(config, devices)
    if not node:
        write_rooms(config, config.paths.configs, (room,))
    set_environment(plan(config, run_file, devices).process(room).env)
    return Opened(config, run_file)


def _is_rank_of_one_alone() -> bool:
    """Of a `trainer` that no launcher started."""
    return RANKS_PARENT in os.environ and MARKER not in os.environ


def going_on(config: RunConfig) -> RunConfig:
    """As the launcher's processes see the run: it has prepared the folder, and whatever they find there is theirs to go
    on with, whether they are started for the first time or again."""
    return updated(config, {"resume": True, "trainer.ckpt.resume_step": None})


def show(config: RunConfig, devices: Devices, room: ProcessName | None = None) -> list[str]:
    """Prints the plan, and what stands in its way here and now. Returns the latter."""
    run_file = config.paths.configs / f"{room}.json" if room else config.paths.run_config
    print(describe(plan(config, run_file, devices), config, only=room))
    for note in sampling_notes(config.orchestrator.sampling) if room in (None, "orchestrator") else ():
        print(f"\nnote: {note}")
    problems = launch_problems(config, devices, section=room)
    for problem in problems:
        print(f"\nnot ready: {problem}")
    return problems


def make_room(paths: RunPaths, *, resume: bool, resume_step: int | None) -> None:
    if aside := prepare_folder(paths, resume=resume, resume_step=resume_step):
        print(f"an earlier run lay in {paths.root}: moved to {aside}", flush=True)


def set_environment(variables: Mapping[str, str]) -> None:
    """Ours where the user has not set one; which GPUs are visible is ours to say."""
    for name, value in variables.items():
        if name == "CUDA_VISIBLE_DEVICES":
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)


def end_with_parent() -> None:
    parent = os.environ.get(RANKS_PARENT) or os.environ.get(KEEPER) or os.environ.get(MARKER)
    if parent:
        die_with_parent(int(parent))


def become_ranks(num_ranks: int, module: str, run_file: Path, *, nodes: Nodes | None = None) -> None:
    """Return in each rank. Where there are several, the process that was started starts them, and ends with them.

    The ranks are tied to that process as it is to its parent. On several machines it runs torchrun.

    Args:
        num_ranks: on all machines together.
        nodes: where there are several.
    """
    if RANKS_PARENT in os.environ:
        return
    if num_ranks == 1:
        os.environ |= _single_rank()
        return
    os.environ[RANKS_PARENT] = str(os.getpid())
    sys.stdout.flush()
    if nodes is None:
        sys.exit(run_ranks(num_ranks, [sys.executable, "-m", module, "--run", str(run_file)]))
    sys.exit(_torchrun(_torchrun_arguments(num_ranks, module, run_file, nodes)))


def _torchrun(arguments: list[str]) -> int:
    """As the program does, with one difference: an exit code that is final stays what it is."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))
        return 0
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        by_itself = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes
        named = ", ".join(f"rank {rank}: {code}" for rank, code in sorted(by_itself.items()))
        print(f"ranks failed, the others were stopped. Exit codes: {named}", file=sys.stderr)
        return next((code for code in FINAL_EXIT_CODES if code in codes.values()), 1)
    except SignalException as error:
        return 128 + int(error.sigval)


def _single_rank() -> dict[str, str]:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def _torchrun_arguments(num_ranks: int, module: str, run_file: Path, nodes: Nodes) -> list[str]:
    """Build torchrun's command line. After `--` nothing is torchrun's: it would take our `--run` for its `--run-path`.
    Each machine's keeper starts its ranks again, so torchrun does not."""
    torchrun = [*nodes.arguments(), "--max-restarts", "0", "--nproc-per-node", str(num_ranks // nodes.count)]
    return [*torchrun, "-m", "--", module, "--run", str(run_file)]


def rank() -> int:
    return int(os.environ.get("RANK", "0"))
