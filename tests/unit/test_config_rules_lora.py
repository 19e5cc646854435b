"""What is refused of adapters, for `rl` and for `sft`."""

from __future__ import annotations

from pathlib import Path

import pytest

from trireme.base.devices import Devices
from trireme.config.aliases import KNOWN_ELSEWHERE
from trireme.config.fields import walk
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules import launch_problems, problems
from trireme.config.rules_lora import engine_rank, lora_problems
from trireme.config.run import RunConfig
from trireme.config.trainer import Lora
from trireme.inference.server import environment, server_arguments

CPU = Devices(cores=2)
ENV = ("--orchestrator.env", '[{"id": "x"}]', "--model.name", "a/b")
ADAPTER = ("--trainer.model.lora.sync", "adapter")


def resolved(*argv: str) -> RunConfig:
    return resolve(load_run_config([*ENV, *argv], program="rl")[0], CPU)


def refusals(*argv: str) -> list[str]:
    config = resolved(*argv)
    return problems(config, CPU) + launch_problems(config, CPU)


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_a_run_with_adapters_may_start(sync: str) -> None:
    assert refusals("--trainer.model.lora.rank", "8", "--trainer.model.lora.sync", sync) == []


def test_the_shipped_configuration_holds() -> None:
    path = Path(__file__).parents[2] / "configs/reverse-text/lora.toml"
    config = resolve(load_run_config(["@", str(path)], program="rl")[0], CPU)
    assert problems(config, CPU) == []
    assert config.trainer.model.lora is not None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--trainer.model.lora.modules-to-save", '["lm_head"]'), "modules_to_save = ['lm_head']"),
        (("--trainer.model.lora.target-modules", '["all-linear"]'), "all-linear in target_modules"),
        (("--trainer.model.lora.target-modules", '["q_proj", "lm_head"]'), "lm_head in target_modules"),
        (("--trainer.model.lora.rank", "1000"), "rank = 1000"),
        (("--weight-broadcast.delta", "true"), "weight_broadcast.delta"),
    ],
)
def test_what_engines_cannot_hold_is_refused_as_adapters_and_merged_else(flags: tuple[str, str], words: str) -> None:
    (problem,) = refusals("--trainer.model.lora.alpha", "8", *flags, *ADAPTER)
    assert words in problem
    assert refusals("--trainer.model.lora.alpha", "8", *flags) == []


def test_a_module_is_adapted_or_trained_whole() -> None:
    (problem,) = lora_problems("model.lora", Lora(target_modules=("q_proj",), modules_to_save=("q_proj",)))
    assert "q_proj in `target_modules` and in `modules_to_save`" in problem
    (problem,) = lora_problems("model.lora", Lora(target_modules=("embed_tokens",)))
    assert 'modules_to_save = ["embed_tokens"]' in problem
    (problem,) = lora_problems("model.lora", Lora(target_modules=()))
    assert "all-linear" in problem


def test_supervised_training_has_no_engine_to_hand_adapters_to() -> None:
    (problem,) = lora_problems("model.lora", Lora(sync="adapter"), has_engines=False)
    assert 'model.lora.sync = "adapter"' in problem
    assert [*lora_problems("model.lora", Lora(), has_engines=False)] == []


def test_a_folder_with_adapters_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    found = "\n".join(refusals("--model.name", str(tmp_path)))
    assert "adapters, not a model" in found
    assert "trireme export" in found


def test_names_from_elsewhere_lead_to_keys_that_there_are() -> None:
    keys = {key for key, _ in walk(RunConfig)}
    ours = {name: key for name, key in KNOWN_ELSEWHERE.items() if "lora" in name}
    assert len(ours) == 7
    assert set(ours.values()) <= keys


def test_engines_are_told_of_adapters_only_where_they_are_to_hold_them() -> None:
    merged, adapter = resolved("--trainer.model.lora.rank", "9"), resolved("--trainer.model.lora.rank", "9", *ADAPTER)
    assert "--enable-lora" not in server_arguments(merged)
    arguments = server_arguments(adapter)
    assert arguments[arguments.index("--max-lora-rank") + 1] == "16"
    assert arguments[arguments.index("--lora-target-modules") + 1 :][:2] == ["q_proj", "k_proj"]
    one_layer = resolved("--trainer.model.lora.target-modules", '["layers.1.self_attn.q_proj"]', *ADAPTER)
    arguments = server_arguments(one_layer)
    assert arguments[arguments.index("--lora-target-modules") + 1] == "q_proj"  # the engine knows last names alone
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in environment(adapter)
    assert [engine_rank(rank) for rank in (1, 2, 8, 9, 300)] == [1, 8, 8, 16, 320]
