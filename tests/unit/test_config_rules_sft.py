"""What `sft` refuses before anything starts, and what it says to those who come from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.aliases import KNOWN_ELSEWHERE_SFT, SFT_ALIASES
from trireme.config.fields import walk
from trireme.config.load import load_config
from trireme.config.resolve import resolve_sft
from trireme.config.rules import check_sft
from trireme.config.rules_sft import data_files, is_on_a_hub
from trireme.config.sft import SftConfig

CPU = Devices(cores=2)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.jsonl").touch()


def load(*argv: str, devices: Devices = CPU) -> SftConfig:
    config, _ = load_config(["--model.name", "a/b", *argv], SftConfig, program="sft")
    config = resolve_sft(config, devices)
    check_sft(config, devices)
    return config


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(*argv)
    return str(error.value)


def test_what_is_there_is_taken(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.parquet").touch()
    for data in ("here.jsonl", "folder", "owner/name"):
        assert load("--data", data).sources[0].data == data


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "no data is given"),
        (("--data", "heer.jsonl"), 'data = "heer.jsonl" does not exist'),
        (("--data", "heer.jsonl"), "Near it: here.jsonl."),
        (("--data", "."), "a folder"),
        (("--data", "data.csv"), "expected one of .jsonl, .json, .parquet, .py"),
        (("--data", "here.jsonl", "--validation", "none.jsonl"), 'validation = "none.jsonl" does not exist'),
        (("--data", "here.jsonl", "--validation", "here.jsonl", "--validation-fraction", "0.1"), "one of the two"),
        (("--data", "here.jsonl", "--validation-interval", "5"), "nothing to measure on"),
        (("--data", "here.jsonl", "--num-epochs", "2", "--max-steps", "7"), "max_steps = 7 and num_epochs = 2"),
        (("--data", "here.jsonl", "--loss-on", "[]"), "loss_on = []"),
        (("--data", "here.jsonl", "--chat-template", "none.jinja"), 'chat_template = "none.jinja" is no file'),
        (("--data", "here.jsonl", "--micro-batch-tokens", "8"), "room for the longest sample"),
        (("--source", '[{"data": "none.json"}]'), 'source[0].data = "none.json" does not exist'),
    ],
)
def test_what_cannot_work_is_refused_in_three_parts(argv: tuple[str, ...], said: str) -> None:
    Path("data.csv").touch()
    if argv[:2] == ("--data", "."):
        Path("here.jsonl").unlink()
    message = refused(*argv)
    assert said in message
    assert " - expected " in message or " - its " in message


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="one GPU per rank"):
        load("--data", "here.jsonl", "--num-ranks", "3", devices=Devices(gpus=("0",), cores=4))


def test_a_name_of_two_parts_is_a_hubs_unless_it_is_here() -> None:
    assert is_on_a_hub("owner/name")
    assert not is_on_a_hub("owner/name.jsonl")
    assert not is_on_a_hub("./owner/name")
    assert not is_on_a_hub("name")
    Path("owner/name").mkdir(parents=True)
    assert not is_on_a_hub("owner/name")
    assert not is_on_a_hub("owner/other")


def test_a_folders_files_come_by_name_and_others_are_left_out() -> None:
    for name in ("b.jsonl", "a.parquet", "c.json", "notes.md", "make.py"):
        Path(name).touch()
    assert [path.name for path in data_files(Path("."))] == ["a.parquet", "b.jsonl", "c.json", "here.jsonl"]


@pytest.mark.parametrize("table", ['data = "here.jsonl"', '[data]\npath = "here.jsonl"', '[data]\nname = "here.jsonl"'])
def test_the_table_that_others_have_is_our_key(table: str) -> None:
    Path("run.toml").write_text(f"{table}\n")
    assert load("@", "run.toml").data == "here.jsonl"
    assert load("--data.path", "here.jsonl").data == "here.jsonl"


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("learning_rate", "optim.lr"),
        ("num_train_epochs", "num_epochs"),
        ("per_device_train_batch_size", "batch_size"),
        ("assistant_only_loss", "loss_on"),
        ("train_on_inputs", "loss_on"),
        ("packing", "micro_batch_tokens"),
        ("max_length", "seq_len"),
        ("dataset_name", "data"),
        ("eval_steps", "validation_interval"),
        ("save_steps", "ckpt.interval"),
        ("lora_r", "model.lora.rank"),
        ("gradient_checkpointing", "model.ac.freq"),
    ],
)
def test_what_people_bring_from_other_tools_is_pointed_to_ours(typed: str, ours: str) -> None:
    Path("run.toml").write_text(f'data = "here.jsonl"\n{typed} = 1\n')
    assert f"`{typed}`" in (message := refused("@", "run.toml"))
    assert f"Did you mean `{ours}`" in message


def test_every_pointer_points_to_a_key_that_exists() -> None:
    known = {key for key, _ in walk(SftConfig)}
    assert {*KNOWN_ELSEWHERE_SFT.values(), *SFT_ALIASES.values()} <= known
    assert not {*KNOWN_ELSEWHERE_SFT, *SFT_ALIASES} & known
