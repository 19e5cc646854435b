"""The `vf-…` commands: names that people know, for what goes by another name here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trireme.base.devices import Devices, detect_devices
from trireme.base.errors import ConfigError
from trireme.base.paths import atomic_write
from trireme.cli.door import make_room, run_door
from trireme.cli.foreign import as_run, read_foreign, their_keys_named
from trireme.cli.rl import dry_run, find_environments, write_configs
from trireme.cli.trireme import trireme
from trireme.config.arguments import HELP, TypedFlag, parse_arguments
from trireme.config.files import ProcessName
from trireme.config.load import Invocation, knows
from trireme.config.problems import raise_together
from trireme.config.rules import launch_problems
from trireme.config.run import RunConfig
from trireme.config.section import as_flag
from trireme.launch.folder import hold_folder
from trireme.launch.going_on import check_goes_on
from trireme.launch.plan import Plan, plan
from trireme.tools.formats.translation import as_toml
from trireme.tools.formats.vf_rl_engine import NEEDLESS, OURS

ENVIRONMENTS = Path("environments")


def vf_setup() -> None:
    run_door("vf-setup", lambda argv: trireme(["lab", "setup", "--vf-rl", *argv]))


def vf_init() -> None:
    run_door("vf-init", lambda argv: trireme(["env", "init", *with_path(argv)]))


def vf_install() -> None:
    run_door("vf-install", install)


def vf_eval() -> None:
    run_door("vf-eval", lambda argv: trireme(["eval", "run", *argv]))


def vf_tui() -> None:
    run_door("vf-tui", lambda argv: trireme(["eval-view", *argv]))


def vf_vllm() -> None:
    run_door("vf-vllm", serve)


def vf_train() -> None:
    run_door("vf-train", train)


def with_path(argv: list[str]) -> list[str]:
    """`-p` is `--path` here."""
    return ["--path" if word == "-p" else word for word in argv]


def install(argv: list[str]) -> int:
    """Environments of the repository are in `environments/` as they are, and without `vf-` in their names."""
    words = [known_name(word) for word in with_path(argv) if word != "--from-repo"]
    if "--from-repo" in argv:
        print(f"--from-repo: the environments that come with this repository are in {ENVIRONMENTS} already")
    return trireme(["env", "install", *words])


def known_name(word: str, root: Path = ENVIRONMENTS) -> str:
    """
    Example:
        known_name("vf-math-python")  # "math-python", where environments/ has that and no vf_math_python
    """
    plain = word.removeprefix("vf-")
    is_here = [(root / name.replace("-", "_") / "pyproject.toml").is_file() for name in (word, plain)]
    return plain if is_here == [False, True] else word


def serve(argv: list[str]) -> None:
    """`inference`: of a file of `vf-rl`, or of vLLM's own flags."""
    from trireme.cli.inference import inference

    if any(word.startswith("@") for word in argv):
        inference(["@", str(_translated_file(argv))])
    else:
        inference(argv if any(word in HELP for word in argv) else list(engine_flags(argv)))


def _translated_file(argv: list[str]) -> Path:
    """Where the other processes' configuration will be, too."""
    foreign = read_foreign(argv, detect_devices(), program="vf-vllm", kinds=("vf-rl",))
    file = foreign.config.paths.configs / "translated.toml"
    with atomic_write(file) as out:
        out.write(as_toml(foreign.translation).encode())
    return file


def engine_flags(argv: list[str]) -> Iterator[str]:
    """vLLM's flags as those of `inference`; that command's own may stand among them.

    Example:
        engine_flags(["--model", "m", "--enforce-eager"])
        # "--inference.model.name", "m", "--inference.model.enforce-eager"
    """
    known = OURS | {"model": "inference.model.name", "port": "inference.server.port"}
    for flag in parse_arguments(argv):
        if not isinstance(flag, TypedFlag):
            raise ConfigError(f"`{flag.name}` - expected flags of vLLM. Write `--model NAME` and the like.")
        name = ".".join(flag.path)
        if name in NEEDLESS:
            continue
        is_ours = name not in known and (knows(RunConfig, flag) or knows(Invocation, flag))
        place = name if is_ours else known.get(name, f"inference.args.{name}")
        yield from (as_flag(tuple(place.split("."))), *flag.values)
        if name == "max_model_len":
            yield from ("--seq-len", *flag.values)


def train(argv: list[str]) -> int:
    """The run without its engines: `vf-vllm` serves them, at the port that the file says."""
    devices = detect_devices()
    foreign = read_foreign(argv, devices, program="vf-train", kinds=("vf-rl",))
    config = as_run(foreign, devices)
    if foreign.command.print_config:
        print(as_toml(foreign.translation), end="")
        return 0
    if foreign.command.dry_run:
        return dry_run(config, devices)
    rooms: tuple[ProcessName, ...] = ("orchestrator", "trainer")
    found = [launch_problems(config, devices, section=room) for room in rooms]
    with their_keys_named(foreign.file, foreign.translation):
        raise_together([problem for problems in found for problem in problems])
    find_environments(config)
    return _supervise_without_engines(config, devices)


def _supervise_without_engines(config: RunConfig, devices: Devices) -> int:
    from trireme.launch.supervise import supervise

    check_goes_on(config)
    with hold_folder(config.paths) as lock:
        make_room(config.paths, resume=config.resume, resume_step=config.trainer.ckpt.resume_step)
        write_configs(config, config.paths.configs)
        whole = plan(config, config.paths.run_config, devices)
        others = tuple(process for process in whole.processes if process.name != "inference")
        return supervise(Plan(whole.run_file, others), config, keep_open=(lock,))
