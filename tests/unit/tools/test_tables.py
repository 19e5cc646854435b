"""`trireme rollouts`: what other trainers read is what the journal holds."""

import json
import shutil
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from jinja2 import Template
from pyarrow import parquet

from support.models.tiny_pictures import picture_file, shown
from support.runs.written_run import rewrite_batch, write_whole_run
from trireme.algo.pictures import PictureRules
from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.config.files import read_run
from trireme.config.run import RunConfig
from trireme.config.sft import Source
from trireme.journal.journal import Journal
from trireme.journal.pictures import PictureFiles
from trireme.journal.records import Rollout
from trireme.tools.datasets import write
from trireme.tools.datasets.write import command as rollouts
from trireme.trainer.sft.conversations import read_conversations
from trireme.trainer.sft.pictures import PictureReader

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK = [
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "2"}, {"type": "image_url"}]},
    {"role": "assistant", "content": "It is 2."},
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    config = write_whole_run(tmp_path_factory.mktemp("whole") / "run", batches=3)

    def talk(batch):
        for rollout in batch.rollouts:
            rollout.completion = TALK

    rewrite_batch(config, 0, talk)
    return config.paths.root


@pytest.fixture
def run(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def journal_of(run: Path) -> list[tuple[int, Rollout]]:
    journal = Journal(run / "journal")
    return [(step, rollout) for step in journal.steps() for rollout in journal.read(step).rollouts]


def load(path: Path) -> list[dict]:
    from datasets import Dataset

    return list(Dataset.from_parquet(str(path), cache_dir=str(path.parent), keep_in_memory=True))


def written_as(kind: str, run: Path, *flags: str) -> dict[str, list[dict]]:
    """Write the sets of a kind of trainer. Returns the rows of each file by its name."""
    assert rollouts([str(run), "--to", kind, *flags]) == 0
    folder = run / "rollouts" / kind
    lines = {file.stem: list(map(json.loads, file.open())) for file in folder.glob("*.jsonl")}
    return lines | {file.stem: load(file) for file in folder.glob("*.parquet")}


def test_every_rollout_comes_out_with_all_that_the_journal_knows_of_it(run, capsys):
    rows, written = written_as("parquet", run)["rollouts"], journal_of(run)
    file = run / "rollouts" / "parquet" / "rollouts.parquet"
    assert parquet.ParquetFile(file).num_row_groups == 3  # a batch each
    assert f"{len(written):8}  {file}" in capsys.readouterr().out
    for row, (step, rollout) in zip(rows, written, strict=True):
        assert row["step"] == step
        for name in ("group", "place", "env", "reward", "answer", "truncated", "masked", "model"):
            assert row[name] == getattr(rollout, name)
        assert {metric["name"]: metric["value"] for metric in row["metrics"]} == rollout.metrics
        for sample, tokens in zip(row["samples"], rollout.samples, strict=True):
            for name, values in sample.items():
                known = getattr(tokens, name)  # a column that only some samples have is None in the others
                assert values is None if known is None else np.array_equal(np.array(values, known.dtype), known)
    for line, row in zip(written_as("jsonl", run)["rollouts"], rows, strict=True):
        assert line.pop("metrics") == {metric["name"]: metric["value"] for metric in row.pop("metrics")}
        assert [message["role"] for message in line.pop("completion")] == [m["role"] for m in row.pop("completion")]
        assert line == row


def test_trl_finds_its_columns_and_the_rewards_of_the_journal(run):
    sets, written = written_as("trl", run), [rollout for _, rollout in journal_of(run)]
    examples = [(row["env"], row["example"]) for row in sets["prompt_only"]]
    assert sorted(examples) == sorted({(rollout.env, rollout.example) for rollout in written})
    assert [row["reward"] for row in sets["prompt_completion"]] == [rollout.reward for rollout in written]
    samples = [sample for rollout in written if rollout.masked is None for sample in rollout.samples]
    assert [row["input_ids"] for row in sets["tokens"]] == [sample.ids.tolist() for sample in samples]
    assert [row["completion_mask"] for row in sets["tokens"]] == [sample.loss_mask.tolist() for sample in samples]
    groups = [list(group) for _, group in groupby(written, key=lambda rollout: rollout.group)]
    rewards = [[rollout.reward for rollout in group] for group in groups]
    best_and_worst = [(max(each), min(each)) for each in rewards if max(each) > min(each)]
    assert [(row["score_chosen"], row["score_rejected"]) for row in sets["preference"]] == best_and_worst
    assert [row["margin"] for row in sets["preference"]] == [best - worst for best, worst in best_and_worst]
    talk = sets["prompt_completion"][0]
    assert set(talk["prompt"][0]) == {"role", "content"}
    called, returned, said = talk["completion"]
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert called["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
    assert (called["content"], called["reasoning_content"]) == ("", "hm")
    assert (returned["tool_call_id"], returned["content"]) == ("1", "2\n[image_url]")
    assert (said["content"], said["tool_calls"]) == ("It is 2.", None)


def test_verl_messages_have_only_keys_that_some_message_has(run):
    """A chat template must not take what is not there as if it were."""
    sets, written = written_as("verl", run), [rollout for _, rollout in journal_of(run)]
    prompts, first = sets["train"], written[0]
    assert len(prompts) == len({(rollout.env, rollout.example) for rollout in written})
    assert prompts[0]["prompt"] == [{"role": "user", "content": "say it"}]
    assert (prompts[0]["data_source"], prompts[0]["ability"]) == (first.env, first.env)
    assert prompts[0]["reward_model"] == {"style": "rule", "ground_truth": "it"}
    assert prompts[0]["extra_info"] == {"split": "train", "index": first.example}
    assert [message["role"] for message in sets["sft"][0]["messages"]] == ["user", "assistant", "tool", "assistant"]
    shutil.rmtree(run / "rollouts")
    messages = written_as("verl", run, "--steps", "1")["sft"][0]["messages"]
    template = "{% for m in messages %}{{ m.role }}{% if 'tool_calls' in m %}!{% endif %}: {{ m.content }}|{% endfor %}"
    assert Template(template).render(messages=messages) == "user: say it|assistant: it|"


def test_pictures_are_in_the_files_and_are_read_again_for_fine_tuning(run, tmp_path):
    digest = PictureFiles(run / "journal" / "pictures").add(png := picture_file(56, 28))

    def show(batch):
        parts = [shown(digest), {"type": "text", "text": "Which?"}]
        for rollout in batch.rollouts:
            rollout.prompt = [{"role": "user", "content": parts}]

    config = read_run(RunConfig, run / "configs" / "run.json")
    rewrite_batch(config.model_copy(update={"output_dir": run}), 1, show)
    for kind in ("verl", "jsonl"):
        rollouts([str(run), "--to", kind])
    rows = written_as("trl", run)["prompt_completion"]
    assert [image.size for row in rows for image in row["images"]] == [(56, 28)] * 6
    reader = PictureReader(PictureFiles(tmp_path).add, PictureRules(9, 28, 784, 78400))
    for file in ("trl/prompt_completion.parquet", "verl/sft.parquet", "jsonl/rollouts.jsonl"):
        read = list(read_conversations(Source(data=str(run / "rollouts" / file)), reader))
        assert len(read) == len(journal_of(run))
        seeing = [one for one in read if one.pictures[0]]
        assert {one.pictures[0] for one in seeing} == {((digest, 1, 2),)}
        assert seeing[0].messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "Which?"}]
    assert PictureFiles(tmp_path).read(digest) == png


def test_only_the_chosen_steps_are_written_and_tokens_may_be_left_out(run):
    lines = written_as("jsonl", run, "--steps", "1:3", "--no-tokens")["rollouts"]
    expected = [(rollout.group, rollout.place) for step, rollout in journal_of(run) if step in (1, 2)]
    assert [(line["group"], line["place"]) for line in lines] == expected
    assert not any("samples" in line for line in lines)


def test_what_cannot_be_written_is_refused_and_leaves_nothing(run, tmp_path, capsys, monkeypatch):
    with pytest.raises(ConfigError, match=r"holds no batch. Expected the folder of an `rl` run"):
        rollouts([str(tmp_path), "--to", "trl"])
    with pytest.raises(ConfigError, match=r"has steps 0 to 2, and none of them was asked for"):
        rollouts([str(run), "--to", "trl", "--steps", "9:"])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ConfigError, match="is the folder that this command runs in"):
        rollouts([str(run), "--to", "trl", "--output", "."])
    with pytest.raises(SystemExit):
        rollouts([str(run), "--to", "trl", "--steps", "a:b"])
    assert "'a:b' is no range of steps" in capsys.readouterr().err
    assert not (run / "rollouts").exists()
    rollouts([str(run), "--to", "verl"])
    with pytest.raises(ConfigError, match="is not empty"):
        rollouts([str(run), "--to", "verl"])
    monkeypatch.setattr(write.Parquet, "write", lambda self, rows: (_ for _ in ()).throw(RuntimeError("torn")))
    with pytest.raises(RuntimeError, match="torn"):
        rollouts([str(run), "--to", "trl"])
    assert [path.name for path in (run / "rollouts").iterdir()] == ["verl"]


def test_a_batch_that_is_damaged_or_gone_is_not_left_out_in_silence(run):
    entry = Journal(run / "journal").path(1)
    entry.write_bytes(entry.read_bytes()[:-5])
    with pytest.raises(JournalCorrupt, match="do not match its checksum"):
        rollouts([str(run), "--to", "trl"])
    entry.unlink()
    with pytest.raises(JournalCorrupt, match=r"misses batch 1 of 2.*with `--steps`"):
        rollouts([str(run), "--to", "trl"])
    assert not (run / "rollouts").exists()
    assert rollouts([str(run), "--to", "jsonl", "--steps", "2:"]) == 0
