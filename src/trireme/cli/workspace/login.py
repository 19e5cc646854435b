"""`trireme login`: there is no account; keys of other services go where their own tools look for them."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.tools.evaluate.endpoints import PLACES, read_endpoints


def login(argv: list[str]) -> int:
    parser = ArgumentParser(
        prog="trireme login",
        description="Says which keys and logins a run can use, and where they go. Stores nothing, sends nothing.",
        allow_abbrev=False,
    )
    parser.parse_args(argv)
    print("There is nothing to log in to: everything runs on your own machines, without an account.")
    print("What other services ask for goes where their own tools look:\n")
    print("\n".join(services(os.environ, Path.home())))
    return 0


def services(environ: Mapping[str, str], home: Path) -> list[str]:
    """Return a line for each service: what it is for, where its key goes, whether the key is there. Never a value."""
    hub = Path(environ.get("HF_HOME") or home / ".cache" / "huggingface") / "token"
    keys = sorted(name for name in environ if name.endswith("_API_KEY") and name != "WANDB_API_KEY" and environ[name])
    given = f"{', '.join(keys)} set" if keys else "not set"
    lines = [
        ("models on a hub", "HF_TOKEN, or `hf auth login`", _there(environ, "HF_TOKEN", hub)),
        ("Weights & Biases", "WANDB_API_KEY, or `wandb login`", _there(environ, "WANDB_API_KEY", home / ".netrc")),
        ("models at an endpoint", "configs/endpoints.py or .toml, one entry each", _endpoints()),
        ("judges of environments", "OPENAI_API_KEY and the like; `env_file` of a job", given),
        ("a run on several hosts", "TRIREME_TOKEN, or `hosts.token_file`", _there(environ, "TRIREME_TOKEN")),
    ]
    return [f"  {what:24}{place:50}{state}" for what, place, state in lines]


def _there(environ: Mapping[str, str], variable: str, file: Path | None = None) -> str:
    if environ.get(variable):
        return f"{variable} is set"
    return f"{file} is there" if file and file.is_file() else "not set"


def _endpoints() -> str:
    file = next((place for place in PLACES if place.is_file()), None)
    if file is None:
        return "no such file here; `trireme lab setup` writes one"
    try:
        endpoints = read_endpoints(file)
    except ConfigError as error:
        return f"{file} cannot be used: {error}"
    waiting = sorted({entry.variable for entry in endpoints.values() if entry.variable and not entry.key})
    return f"{file}: {len(endpoints)} entries" + (f"; not set: {', '.join(waiting)}" if waiting else "")
