"""`trireme lab setup`: a folder to work in, with example configurations that this machine can run."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

from trireme.base.devices import detect_devices
from trireme.base.errors import ConfigError
from trireme.config.arguments import choose_verb
from trireme.tools.workspace.setup import SIZES, PythonProject, Size, Workspace, find_shipped, size_of

ENDPOINTS = Path("configs/endpoints.py")
PYTHON_WORDS: dict[PythonProject, tuple[str, str]] = {
    "linked": ("Created Python project", "`uv run` uses the installation of Trireme that this is, by the link .venv"),
    "kept": (
        "Kept the Python project that was here",
        f"`uv run` uses that. Trireme is in {sys.prefix}: activate it, or install Trireme into the project",
    ),
    "needless": ("Needed no Python project", "Trireme is in no virtual environment, so its commands are on PATH"),
}
SIZE_WORDS: dict[Size, str] = {"cpu": "a CPU", "one-gpu": "one GPU", "eight-gpus": "eight GPUs"}

EXAMPLES = {
    "hosted": (("rl/*.toml", "gepa/*.toml", "*/rl.toml"), "uv run rl @ configs/reverse-text/rl.toml"),
    "vf-rl": (("vf-rl/*.toml",), "uv run vf-rl @ configs/vf-rl/reverse-text.toml"),
    "prime-rl": (("prime-rl/*.toml", "*/rl.toml"), "uv run prime-rl @ configs/prime-rl/reverse-text.toml"),
}
"""The files below `configs` of each kind of examples, and the first command to type."""


def lab(argv: list[str]) -> int:
    """Run `trireme lab setup`. Raises: ConfigError if the verb is unknown, or the folder cannot be written."""
    choose_verb("trireme lab", {"setup": "makes a folder to work in"}, argv)
    parser = ArgumentParser(
        prog="trireme lab setup",
        description="Makes a folder to work in: example configurations, environments, tiny models, endpoints. "
        "Overwrites nothing; the same command again adds what is missing.",
        allow_abbrev=False,
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add("--vf-rl", action="store_true", help="configs/vf-rl, for `vf-rl @ FILE`")
    files = "configs/prime-rl, for `prime-rl @ FILE`, and configs/*/rl.toml, for `rl @ FILE`"
    add("--prime-rl", action="store_true", help=files)
    add = parser.add_argument
    add("--size", choices=SIZES, help="the machine that the examples are for; default: this one")
    add("--path", metavar="DIR", type=Path, default=Path(), help="the folder; default: this one")

    typed = parser.parse_args(argv[1:])
    patterns, first_command = EXAMPLES["vf-rl" if typed.vf_rl else "prime-rl" if typed.prime_rl else "hosted"]
    workspace = Workspace(typed.path, find_shipped())
    size = typed.size or size_of(detect_devices())

    # Never write examples into the checkout that they are copied from.
    if workspace.root.resolve() == workspace.shipped.resolve():
        _print_done("Nothing to do", "this is the checkout itself; configs, environments and models are here")
        if size != "cpu":
            print(
                f"Its configs are for a CPU, with the values for GPUs behind `#|`. For {SIZE_WORDS[size]}, set up a "
                f"folder of its own: trireme lab setup --path ../lab --size {size}"
            )
        return 0

    # Each step keeps files that are there, so that the same command again adds only what is missing.
    try:
        workspace.root.mkdir(parents=True, exist_ok=True)
        _print_done(*PYTHON_WORDS[workspace.link_python()])
        environments, models = workspace.bring_environments(), workspace.bring_models()
        counts = f"configs, environments ({environments} packages), models ({models} tiny ones)"
        _print_done("Created workspace structure", counts)
        workspace.bring_file(ENDPOINTS)
        _print_done("Wrote endpoints", f"{ENDPOINTS}, for `trireme eval` and `trireme gepa`")
        written = workspace.write_examples(patterns, size)
    except OSError as error:
        raise ConfigError(
            f"{typed.path} cannot be set up: {error}. Expected a folder that can be written. Name another by `--path`."
        ) from error

    files = ", ".join(f"configs/{pattern} ({count})" for pattern, count in written.items() if count)
    _print_done(f"Wrote example configs for {SIZE_WORDS[size]}", files)
    for file in workspace.kept:
        print(f"  kept {file}, which was here and differs; remove it to have the example")
    cd = "" if workspace.root == Path() else f" cd {workspace.root} &&"
    print(f"\nNext:{cd} {first_command}")
    return 0


def _print_done(what: str, details: str) -> None:
    print(f"✓ {what}: {details}")
