"""What `sft` refuses before anything starts, and what it says to those who come from elsewhere."""

import shlex
from pathlib import Path

import pytest

from resolved_runs import CPU
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.load import load_config
from trireme.config.resolve import resolve_sft
from trireme.config.rules import check_sft
from trireme.config.sft import SftConfig, data_files, is_on_a_hub


@pytest.fixture(autouse=True)
def _data(here: Path) -> None:
    Path("here.jsonl").touch()


def load(flags: str, devices: Devices = CPU) -> SftConfig:
    config, _ = load_config(shlex.split(f"--model.name a/b {flags}"), SftConfig, program="sft")
    config = resolve_sft(config, devices)
    check_sft(config, devices)
    return config


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "no data is given"),
        ("--data heer.jsonl", "Near it: here.jsonl."),
        ("--data empty", "a folder without data"),
        ("--data data.csv", "expected one of .jsonl, .json, .parquet, .py"),
        ("--data here.jsonl --validation none.jsonl", 'validation = "none.jsonl" does not exist'),
        ("--data here.jsonl --validation here.jsonl --validation-fraction 0.1", "one of the two"),
        ("--data here.jsonl --validation-interval 5", "nothing to measure on"),
        ("--data here.jsonl --num-epochs 2 --max-steps 7", "max_steps = 7 and num_epochs = 2"),
        ("--data here.jsonl --loss-on []", "loss_on = []"),
        ("--data here.jsonl --chat-template none.jinja", 'chat_template = "none.jinja" is no file'),
        ("--data here.jsonl --micro-batch-tokens 8", "as the longest sample"),
        ("""--source '[{data = "none.json"}]'""", 'source[0].data = "none.json" does not exist'),
        ("--learning-rate 1", "Did you mean `--optim.lr`?"),
        ("--gradient-checkpointing 1", "Did you mean `--model.ac.freq`?"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(flags, words):
    Path("data.csv").touch()
    Path("empty").mkdir()
    with pytest.raises(ConfigError) as error:
        load(flags)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("flags", "data"),
    [
        ("--data here.jsonl --validation here.jsonl --validation-interval 5", "here.jsonl"),
        ("--data here.jsonl --validation-fraction 0.1 --validation-interval 5", "here.jsonl"),
        ("--data here.jsonl --num-epochs 2 --scheduler.type wsd --scheduler.decay-steps 200", "here.jsonl"),
        ("--data folder", "folder"),
        ("--data owner/name", "owner/name"),
        ("--data.path here.jsonl", "here.jsonl"),
        ("@ path.toml", "here.jsonl"),
        ("@ name.toml", "here.jsonl"),
    ],
)
def test_data_that_can_be_trained_on_is_accepted_also_in_the_table_that_others_have(flags, data):
    Path("folder").mkdir()
    for name in ("b.jsonl", "a.parquet", "c.json", "notes.md", "make.py"):
        Path("folder", name).touch()
    for key in ("path", "name"):
        Path(f"{key}.toml").write_text(f'[data]\n{key} = "here.jsonl"\n')
    assert load(flags).sources[0].data == data
    assert [path.name for path in data_files(Path("folder"))] == ["a.parquet", "b.jsonl", "c.json"]


def test_more_ranks_than_gpus_are_refused():
    load("--data here.jsonl --num-ranks 1", Devices(gpus=("0",), cores=4))
    with pytest.raises(ConfigError, match="one GPU per rank"):
        load("--data here.jsonl --num-ranks 2", Devices(gpus=("0",), cores=4))


def test_a_name_of_two_parts_is_a_hubs_unless_it_is_here():
    assert is_on_a_hub("owner/name")
    assert not any(map(is_on_a_hub, ("owner/name.jsonl", "./owner/name", "name")))
    Path("owner/name").mkdir(parents=True)
    assert not any(map(is_on_a_hub, ("owner/name", "owner/other")))
