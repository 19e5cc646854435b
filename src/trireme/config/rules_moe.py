"""Rules of `[trainer.model.moe]`, and what router replay asks of the engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trireme.base.devices import Devices
from trireme.config.files import ProcessName
from trireme.config.readiness import looks_local
from trireme.config.run import RunConfig
from trireme.config.trainer import TrainerModel

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How configurations of models name it."""

REPLAY = "trainer.model.moe.router_replay = true"


def replays_routes(config: RunConfig) -> bool:
    return config.trainer.model.moe.router_replay


def shares_prefixes(config: RunConfig) -> bool:
    """Whether an engine may take a prompt's beginning from a request before.

    In a synchronous run on CPU it may not: a request's arithmetic would depend on what ran before it. There is no
    prefix cache then; but router replay needs one, so no two requests are given the same prefix.
    """
    return not (replays_routes(config) and config.synchronous and config.device == "cpu")


def _replay_has_the_prefix_cache(config: RunConfig, _: Devices) -> Iterator[str]:
    given = {name.replace("-", "_"): value for name, value in config.inference.args.items()}
    if replays_routes(config) and given.get("enable_prefix_caching") is False:
        yield (
            f"inference.args.enable_prefix_caching = false with `{REPLAY}` - without its prefix cache vLLM does not "
            "say which experts it used. Remove one of the two."
        )


def _replay_has_experts(config: RunConfig, _: Devices) -> Iterator[str]:
    name = config.trainer.model.name or config.model.name
    if replays_routes(config) and num_experts_in(name) == 0:
        yield f"`{REPLAY}` with {name} - a model with a mixture of experts was expected. Remove the line."


def _experts_are_sharded(config: RunConfig, _: Devices) -> Iterator[str]:
    yield from _check_expert_parallelism("trainer.model", config.trainer.model)


def expert_problems_of_sft(model: TrainerModel) -> Iterator[str]:
    yield from _check_expert_parallelism("model", model)
    if model.moe.router_replay:
        yield (
            "model.moe.router_replay = true - expected only where an engine samples, as in `rl`: here there are no "
            "routes to replay. Remove the line."
        )


def _check_expert_parallelism(table: str, model: TrainerModel) -> Iterator[str]:
    if model.ep > 1:
        yield (
            f"{table}.ep = {model.ep} - expected 1: ranks that hold whole experts, and send each other tokens, are not "
            "there. Remove the line: experts are sharded over all ranks like everything else, so they take no more "
            "memory, but are gathered for each layer."
        )


def num_experts_in(name: str | None) -> int | None:
    """Of each layer of a model that lies in a folder; 0 where it has none, None where its folder cannot be read."""
    file = Path(name or "") / "config.json"
    if not name or not looks_local(name) or not file.exists():
        return None
    config: dict[str, Any] = json.loads(file.read_text())
    return num_experts_of(config)


def num_experts_of(config: dict[str, Any]) -> int:
    config = config.get("text_config") or config
    return next((config[name] for name in NUM_EXPERTS if config.get(name)), 0)


Rule = Callable[[RunConfig, Devices], Iterator[str]]

RULES: tuple[tuple[Rule, tuple[ProcessName | None, ...]], ...] = (
    (_replay_has_the_prefix_cache, (None, "orchestrator", "inference")),
    (_experts_are_sharded, (None, "trainer")),
)
LAUNCH_RULES: tuple[tuple[Rule, tuple[ProcessName | None, ...]], ...] = (
    (_replay_has_experts, (None, "orchestrator", "trainer", "inference")),
)
