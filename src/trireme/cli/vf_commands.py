"""The other `vf-…` commands: names that users of verifiers know, for commands that have another name here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.base.paths import atomic_write
from trireme.cli.command import run_command
from trireme.cli.other_formats import run_translated
from trireme.cli.trireme import trireme
from trireme.config.arguments import HELP, TypedFlag, parse_arguments
from trireme.config.load import Invocation, knows
from trireme.config.rows.prime_rl import of_vllm
from trireme.config.run import RunConfig
from trireme.config.section import as_flag
from trireme.tools.formats.run_file import read_run_file

ENVIRONMENTS = Path("environments")


vf_setup = partial(run_command, "vf-setup", lambda argv: trireme(["lab", "setup", "--vf-rl", *argv]))
vf_init = partial(run_command, "vf-init", lambda argv: trireme(["env", "init", *argv]))
vf_install = partial(run_command, "vf-install", lambda argv: install(argv))
vf_eval = partial(run_command, "vf-eval", lambda argv: trireme(["eval", "run", *argv]))
vf_tui = partial(run_command, "vf-tui", lambda argv: trireme(["eval-view", *argv]))
vf_vllm = partial(run_command, "vf-vllm", lambda argv: serve(argv))
vf_train = partial(run_command, "vf-train", lambda argv: run_translated("vf-train", argv))


def install(argv: list[str]) -> int:
    """Install environments. Those of this repository are in `environments/`, without `vf-` in their names."""
    words = [known_name(word) for word in argv if word != "--from-repo"]
    if "--from-repo" in argv:
        print(f"--from-repo: the environments that come with this repository are in {ENVIRONMENTS} already")
    return trireme(["env", "install", *words])


def known_name(word: str, root: Path = ENVIRONMENTS) -> str:
    """Return the name of an environment without `vf-`, if only that one is here.

    Example:
        known_name("vf-math-python")  # "math-python" if environments/ has that and no vf_math_python
    """
    plain = word.removeprefix("vf-")
    is_here = [(root / name.replace("-", "_") / "pyproject.toml").is_file() for name in (word, plain)]
    return plain if is_here == [False, True] else word


def serve(argv: list[str]) -> None:
    """Start `inference` from a file of `vf-rl`, or from vLLM's own flags."""
    from trireme.cli.inference import inference

    if not any(word.startswith("@") for word in argv):
        inference(argv if any(word in HELP for word in argv) else list(engine_flags(argv)))
        return

    # `inference` reads our own format, so the translation is written to a file.
    typed = read_run_file(argv, detect_devices(), program="vf-vllm", kinds=("vf-rl",))
    file = typed.config.paths.configs / "translated.toml"  # next to the other processes' configuration
    with atomic_write(file) as out:
        out.write(typed.as_toml().encode())
    inference(["@", str(file)])


def engine_flags(argv: list[str]) -> Iterator[str]:
    """Yield vLLM's flags as those of `inference`. Flags of `inference` itself may be among them.

    Example:
        engine_flags(["--model", "m", "--enforce-eager"])  # "--model.name", "m", "--inference.model.enforce-eager"
    """
    flags_of_vllm = {row.theirs.removeprefix("."): row.ours for row in of_vllm("")}
    for flag in parse_arguments(argv):
        if not isinstance(flag, TypedFlag):
            raise ConfigError(f"`{flag.name}` - expected flags of vLLM. Write `--model NAME` and the like.")

        # Flags that vLLM and we both have are taken as vLLM's, which users of this command mean.
        name = ".".join(flag.path)
        is_ours = name not in flags_of_vllm and (knows(RunConfig, flag) or knows(Invocation, flag))
        target = name if is_ours else flags_of_vllm.get(name, f"inference.args.{name}")
        if isinstance(target, str):
            yield from (as_flag(tuple(target.split("."))), *flag.values)

        if name == "max_model_len":
            yield from ("--seq-len", *flag.values)
