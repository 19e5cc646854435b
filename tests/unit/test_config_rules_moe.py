"""What `[trainer.model.moe]` asks for that cannot be is refused before anything starts; and what engines are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trireme.base.devices import Devices
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules import launch_problems, problems
from trireme.config.rules_moe import expert_problems_of_sft, num_experts_in, shares_prefixes
from trireme.config.run import RunConfig
from trireme.config.trainer import Experts, TrainerModel
from trireme.inference.server import server_arguments

CPU = Devices(gpus=(), cores=4)
GPUS = Devices(gpus=("0", "1"), cores=4)
ENV = ("--orchestrator.env", '[{ id = "reverse-text" }]')
REPLAY = ("--trainer.model.moe.router-replay", "true")
SYNCHRONOUS = ("--max-async-level", "0")


def resolved(*flags: str, on: Devices = CPU) -> RunConfig:
    return resolve(load_run_config([*ENV, *flags], program="rl")[0], on)


def mentioned(words: str, *flags: str, at_launch: bool = False) -> list[str]:
    found = (launch_problems if at_launch else problems)(resolved(*flags), CPU)
    return [message for message in found if words in message]


def save_config(folder: Path, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_router_replay_needs_the_engines_prefix_cache() -> None:
    (message,) = mentioned("prefix_caching", *REPLAY, "--inference.args.enable-prefix-caching", "false")
    assert "without its prefix cache vLLM does not say which experts it used. Remove one of the two." in message
    assert mentioned("prefix_caching", *REPLAY) == []


def test_router_replay_needs_a_model_with_experts(tmp_path: Path) -> None:
    flags = (*REPLAY, "--model.name", save_config(tmp_path, num_hidden_layers=2, num_experts=0))
    (message,) = mentioned("mixture of experts", *flags, at_launch=True)
    assert f"`trainer.model.moe.router_replay = true` with {tmp_path} - a model with a mixture" in message
    save_config(tmp_path, num_hidden_layers=2, num_experts=4)
    assert mentioned("mixture of experts", *flags, at_launch=True) == []


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_are_counted_under_any_of_their_names(tmp_path: Path, key: str) -> None:
    assert num_experts_in(save_config(tmp_path, **{key: 6})) == 6
    assert num_experts_in(save_config(tmp_path, text_config={key: 5})) == 5
    assert num_experts_in("owner/model-on-a-hub") is None


def test_expert_parallelism_is_refused_with_what_there_is_instead() -> None:
    (message,) = mentioned("ranks that hold whole experts", "--trainer.model.ep", "2", "--trainer.num-ranks", "2")
    assert message.startswith("trainer.model.ep = 2 - expected 1")
    assert next(expert_problems_of_sft(TrainerModel(ep=2))).startswith("model.ep = 2")


def test_supervised_training_has_no_routes_to_replay() -> None:
    (message,) = expert_problems_of_sft(TrainerModel(moe=Experts(router_replay=True)))
    assert "there are no routes to replay" in message
    assert [*expert_problems_of_sft(TrainerModel())] == []


def test_engines_are_told_to_say_which_experts_they_use_only_where_it_is_wanted() -> None:
    assert "--enable-return-routed-experts" in server_arguments(resolved(*REPLAY, on=GPUS))
    on_cpu = server_arguments(resolved(*REPLAY))
    assert "trireme.inference.cpu_routing.RoutingWorker" in on_cpu
    assert "trireme.inference.cpu_routing.RoutingScheduler" in on_cpu
    assert not [word for word in server_arguments(resolved()) if "rout" in word]


def test_a_synchronous_run_on_cpu_shares_no_prefixes_with_or_without_the_cache() -> None:
    """What ran before a request must not show in its bits: router replay needs the cache, so nothing may match."""
    plain, replaying = resolved(*SYNCHRONOUS), resolved(*SYNCHRONOUS, *REPLAY)
    assert "--no-enable-prefix-caching" in server_arguments(plain)
    assert "--enable-prefix-caching" in server_arguments(replaying)
    assert shares_prefixes(plain)  # there is no cache that could
    assert not shares_prefixes(replaying)
    assert shares_prefixes(resolved(*REPLAY))
