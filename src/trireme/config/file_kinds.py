"""Whose format a file is in, told by keys that only that one has."""

from __future__ import annotations

from typing import Any, Literal

Kind = Literal["run", "vf-rl", "flat", "hosted", "gepa"]

FLAT_ONLY = frozenset(
    {
        "model_name",
        "num_gpus",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "use_difficulty_filtering",
        "difficulty_threshold",
    }
)
HOSTED_ONLY = frozenset({"env", "sampling", "env_file"})

COMMANDS: dict[Kind, str] = {
    "run": "rl @",
    "vf-rl": "vf-rl @",
    "flat": "prime-rl",
    "hosted": "prime-rl",
    "gepa": "trireme gepa",
}
"""What starts a file of each on this machine, before its name."""

_DESCRIPTIONS: dict[Kind, str] = {
    "run": "a file of `rl`",
    "vf-rl": "a file of `vf-rl`",
    "flat": "a flat file of `prime-rl`",
    "hosted": "a file of hosted training",
    "gepa": "a file of `trireme gepa`, which trains nothing",
}


def kind_of(table: dict[str, Any]) -> Kind:
    """Ours (`run`) unless something in it says otherwise.

    Example:
        kind_of({"model": "m", "env": [{"id": "e"}]})  # "hosted"
    """
    if "orchestrator" in table:
        return "run"
    sides = [side for name in ("inference", "trainer") if isinstance(side := table.get(name), dict)]
    if _is_vf_rl(table, sides):
        return "vf-rl"
    if sides:
        return "run"
    if "env_id" in table:
        return "gepa"
    if FLAT_ONLY & table.keys():
        return "flat"
    return "hosted" if HOSTED_ONLY & table.keys() else "run"


def _is_vf_rl(table: dict[str, Any], sides: list[dict[str, Any]]) -> bool:
    """Each side counts its GPUs there; the trainer's keys are in a table of their own."""
    trainer, env = table.get("trainer"), table.get("env")
    if any("gpus" in side for side in sides) or (isinstance(trainer, dict) and "args" in trainer):
        return True
    return isinstance(table.get("model"), str) and isinstance(env, dict) and bool(sides)


def belongs_elsewhere(file: str, kind: Kind, *, expected: Kind = "run") -> str:
    """What to say of a file that was given to the command of another format."""
    command = f"{COMMANDS[kind]} {file}"
    also = (
        f"; `{command} --print-config > rl.toml` makes a file of `rl` out of it" if kind not in ("run", "gepa") else ""
    )
    cluster = f", or `trireme submit {file}` for a cluster" if kind == "hosted" else ""
    return f"{file} is {_DESCRIPTIONS[kind]} - expected {_DESCRIPTIONS[expected]}. Type `{command}`{cluster}{also}."
