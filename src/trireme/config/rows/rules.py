"""Rules for keys whose values have to be computed. Each returns our keys with values, or why there is no effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePath
from typing import Any

from trireme.base.devices import Devices, detect_devices
from trireme.base.errors import ConfigError
from trireme.config.files import toml_value
from trireme.config.model.tokenizer import has_vocabulary, read_tokenizer
from trireme.config.nested import value_at
from trireme.config.translation import Refused, Rule, Settings

NO_GPU = "this machine shows no GPU"
HARDWARE = "tunes hardware only"
ALWAYS = "always so here"


_MACHINE: ContextVar[Devices | None] = ContextVar("machine", default=None)


@contextmanager
def on_machine(devices: Devices) -> Iterator[None]:
    """Translate for other devices than those of this machine, such as a cluster's."""
    before = _MACHINE.set(devices)
    try:
        yield
    finally:
        _MACHINE.reset(before)


def has_gpus() -> bool:
    return bool((_MACHINE.get() or detect_devices()).gpus)


def is_off(value: Any) -> bool:
    """Return whether a value means nothing: "None" is how prime-rl writes it in TOML."""
    return value in (None, False, "none", "None", "null", "false")


def value_of(table: dict[str, Any], process: str, *names: str) -> dict[str, Any]:
    """Return a table of a process, which `sft` has at its top; an empty one if there is none."""
    found = value_at(table, (process, *names)) or value_at(table, names)
    return found if isinstance(found, dict) else {}


def to(ours: str, values: dict[Any, Any] | None = None) -> Rule:
    """Return a rule that gives our key the value that stands for theirs; others are taken as they are."""
    return lambda value, table: {ours: (values or {}).get(value, value)}


def on_gpus(ours: str) -> Rule:
    """Return a rule for a key that counts on a machine with GPUs only."""
    return lambda value, table: {ours: value} if has_gpus() else NO_GPU


def only(*values: Any, instead: str, note: str = ALWAYS) -> Rule:
    """Return a rule for a key that has these values here.

    Args:
        instead: why another value is refused, and what to do.
        note: why these values need no key.
    """

    def rule(given: Any, table: dict[str, Any]) -> str:
        if given in values or (None in values and is_off(given)):
            return note
        first, last = ", ".join(map(toml_value, values[:-1])), toml_value(values[-1])
        raise Refused(f"expected {f'{first} or ' if first else ''}{last}: {instead}")

    return rule


def switch(ours: str, value: Any) -> Rule:
    """Return a rule that gives our key a value if theirs is on, be it true or a table."""
    return lambda given, table: "off here too" if is_off(given) else {ours: value}


# models and lengths


def set_name_of_policy(name: str, table: dict[str, Any]) -> Settings | str:
    """`[orchestrator.model] name` is the name that the engine serves the policy under."""
    if value_at(table, ("inference", "vllm", "model")) or value_at(table, ("inference", "model", "name")):
        return "the engine's own table names its model"
    differs = value_at(table, ("trainer", "model", "name"), name) != name
    return {"inference.model.name" if differs else "model.name": name}


def set_seq_len(seq_len: int, table: dict[str, Any]) -> Settings | str:
    """The orchestrator's own length takes precedence over that of the run."""
    if value_at(table, ("orchestrator", "seq_len")) not in (None, seq_len):
        return "`orchestrator.seq_len` takes precedence, as there"
    return {"seq_len": seq_len}


def set_row_length(seq_len: int, table: dict[str, Any]) -> Settings | str:
    """`[trainer.model] seq_len` sizes nothing there if the orchestrator has a length of its own: it packs the rows."""
    of_run = value_at(table, ("orchestrator", "seq_len")) or value_at(table, ("seq_len",))
    return "rows are as long as `seq_len`, by which the orchestrator packs them" if of_run else {"seq_len": seq_len}


THEIRS = {"deployment", "slurm", "monitors", "ckpt", "run"}
"""Tables that files of prime-rl have and ours do not."""


def lacks_gpus(table: dict[str, Any]) -> bool:
    """Return whether a file of prime-rl, which is for GPUs, is read on a machine without any."""
    return bool(THEIRS & table.keys()) and not has_gpus()


def set_attention(attn: str, table: dict[str, Any]) -> Settings | str:
    if attn == "auto":
        return "the attention is chosen by model and device"
    if attn.startswith("flash") and lacks_gpus(table):
        return NO_GPU
    if attn == "flash_attention_4":
        return {"trainer.model.attn": "flash_attention_3"}
    return {"trainer.model.attn": attn}


def set_compile(value: Any, table: dict[str, Any]) -> Settings | str:
    if isinstance(value, dict) and lacks_gpus(table):
        return NO_GPU
    return {"trainer.model.compile": True if isinstance(value, dict) else False if is_off(value) else value}


def set_recomputation(value: Any, table: dict[str, Any]) -> Settings:
    """`targets` of `selective` are chosen here: what matrix products and attention return is kept."""
    if not isinstance(value, dict):
        return {"trainer.model.ac": None if is_off(value) else value}
    return {"trainer.model.ac": {key: each for key, each in value.items() if key != "targets"}}


def set_head_chunk(chunk: Any, table: dict[str, Any]) -> Settings | str:
    is_number = isinstance(chunk, int) and not isinstance(chunk, bool)
    return {"trainer.model.head_chunk": chunk} if is_number else "logits are always computed in chunks"


def set_betas(value: Any, table: dict[str, Any]) -> Settings:
    """Both of AdamW's decays, of which a file may give one."""
    optim = value_of(table, "trainer", "optim")
    second = 0.95 if optim.get("type") == "muon" else 0.999
    first, last = (optim.get("betas1", optim.get("beta1", 0.9)), optim.get("betas2", optim.get("beta2", second)))
    return {"trainer.optim.betas": [first, last]}


def is_theirs(table: dict[str, Any]) -> bool:
    """Return whether a file has a table that no file of ours has."""
    paths = (("orchestrator", "train"), ("orchestrator", "group_size"), ("deployment",), ("monitors",))
    # `data` is no table here, and `ckpt` one of `trainer`, whose tables `sft` has at its top.
    is_rl = "trainer" in table or "orchestrator" in table
    return (
        any(value_at(table, path) is not None for path in paths)
        or isinstance(table.get("data"), dict)
        or (is_rl and "ckpt" in table)
    )


def set_schedule(kind: str, table: dict[str, Any]) -> Settings:
    """prime-rl's `linear` rises, stays, then falls over the last `decay_steps`: our `wsd`. Ours falls from the top.

    Both take 10 steps there if a file gives no number.
    """
    scheduler, theirs = value_of(table, "trainer", "scheduler"), is_theirs(table)
    made: Settings = {"trainer.scheduler.type": kind}
    if kind == "linear" and (theirs or "decay_steps" in scheduler):
        made = {"trainer.scheduler.type": "wsd" if scheduler.get("decay_steps", 10) else "constant"}
        if "decay_steps" not in scheduler:
            made["trainer.scheduler.decay_steps"] = 10
    if theirs and kind != "constant" and "warmup_steps" not in scheduler:
        made["trainer.scheduler.warmup_steps"] = 10
    return made


def set_decay(steps: int, table: dict[str, Any]) -> Settings | str:
    return {"trainer.scheduler.decay_steps": steps} if steps else "the rate stays after the warm-up"


def resume(value: Any, table: dict[str, Any]) -> Settings:
    """`[resume]`: from the newest checkpoint, that of a step, or one of another run's folder."""
    if not isinstance(value, dict):
        return {"resume": value}
    step, settings = value.get("step"), Settings()
    if folder := value.get("dir"):
        # Their folder is that of one step; ours is the run's.
        place = PurePath(folder)
        name = place.name.removeprefix("step_")
        step = int(name) if name.isdigit() and step is None else step
        run = place.parent.parent if name.isdigit() and place.parent.name == "checkpoints" else place
        settings["resume_from"] = str(run)
    if unknown := value.keys() - {"step", "dir"}:
        raise Refused(f"expected `step` and `dir`. Remove `{sorted(unknown)[0]}`.")
    return settings | ({"trainer.ckpt.resume_step": step} if step is not None else {} if settings else {"resume": True})


SKIPPED = {"optimizer": "optimizer", "scheduler": "scheduler", "dataloader": "data", "progress": "progress"}


def skip(value: Any, table: dict[str, Any]) -> Settings | str:
    """Collect the `skip_X = true` of all tables of checkpoints."""
    tables = [value_at(table, (*above, "ckpt"), {}) for above in ((), ("trainer",), ("orchestrator",))]
    found = [ours for theirs, ours in SKIPPED.items() if any(each.get(f"skip_{theirs}") is True for each in tables)]
    return {"trainer.ckpt.resume_without": found} if found else "off here too"


# the machines


def set_transport(kind: str, table: dict[str, Any]) -> Settings | str:
    if kind == "nixl" or (kind == "nccl" and not has_gpus()):
        return f"{NO_GPU if kind == 'nccl' else 'there is no NIXL here'}: weights travel as `auto` says"
    return {"weight_broadcast.type": kind}


# conversations


def retain_thinking(variables: str) -> Rule:
    """Return a rule by which earlier thinking stays, by the variable that the template of a family has for it.

    Args:
        variables: our table of variables of the chat template.
    """

    def rule(kept: Any, table: dict[str, Any]) -> Settings | str:
        if is_off(kept) or kept == "tool_cycle":  # `preserve_all_thinking = true` of v0.6 is "all"
            return "earlier thinking stays as far as the model's chat template keeps it"
        if value_of(table, "orchestrator").get("trajectory_strategy") == "branching":
            return "with `branching`, each turn is trained as the model's chat template renders it"
        if _template_keeps_thinking(table):
            return "the model's own chat template keeps earlier thinking"
        name = value_of(table, "orchestrator", "renderer").get("name", "auto")
        for family, (variable, value) in KEEPS_THINKING.items():
            if name.startswith(family):
                return {f"{variables}.{variable}": value}
        raise Refused(
            "the model's own chat template decides what stays of earlier thinking, and none of its variables is known "
            f"for renderer `{name}`. Give the model a template that keeps thinking, or set "
            '`orchestrator.trajectory_strategy = "branching"`, which trains each turn as the template renders it.'
        )

    return rule


def _template_keeps_thinking(table: dict[str, Any]) -> bool:
    """Return whether the template of the model that a table names keeps earlier thinking; False if it is not here."""
    keys = (("trainer", "tokenizer"), ("trainer", "model"), ("tokenizer",), ("model",))
    name = next((found for key in keys if (found := value_at(table, (*key, "name")))), None)
    if not isinstance(name, str) or not has_vocabulary(Path(name)):
        return False

    # Imported late: most files ask for no template, and need no jinja2 here.
    from trireme.config.model.chat_template import keeps_thinking

    variables = value_at(table, ("orchestrator", "sampling", "chat_template_kwargs"))
    try:
        opened = read_tokenizer(name, Path(name))
    except ConfigError:  # other rules report it
        return False
    given = opened.special_tokens | (variables if isinstance(variables, dict) else {})
    return all(keeps_thinking(text, given) for text in opened.templates.values())


KEEPS_THINKING = {
    "glm-5": ("clear_thinking", False),
    "nemotron-3": ("truncate_history_thinking", False),
    "qwen3.6": ("preserve_thinking", True),
}
"""Renderers by the beginning of their names, and the variable of the template by which thinking stays."""


def set_parser(kind: str) -> Rule:
    """Return a rule for `tool_call_parser` or `reasoning_parser`."""
    ours = f"inference.model.{kind}"
    return lambda name, table: AUTO_PARSER[kind] if name == "auto" else {ours: None if is_off(name) else name}


AUTO_PARSER = {
    "tool_call_parser": "the hermes form of tool calls is read unless a parser is named",
    "reasoning_parser": "thinking is content unless a parser is named",
}

LEVELS = {"trace": "debug", "warn": "warning", "critical": "error"}
BUFFERS: dict[str, Settings] = {
    "online-difficulty": {"orchestrator.buffer.online_difficulty_filtering": True},
    "difficulty-pool": {"orchestrator.buffer.pools": {}},
}
