"""`trireme rollouts`: what other trainers read is what the journal holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.cli.rollouts import rollouts
from trireme.ledger.journal import Journal
from trireme.ledger.records import Rollout
from trireme.messages import build_tokens
from trireme.monitor.rollout_sets import write
from trireme.monitor.rollout_sets.messages import message_types, optional_keys, to_rows
from trireme.monitor.rollout_sets.tables import TABLES, Options
from written_run import GROUP, rewrite_batch, write_whole_run

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK = [
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "2"}, {"type": "image_url"}]},
    {"role": "assistant", "content": "It is 2."},
]


@pytest.fixture
def run(tmp_path):
    """Its first batch has calls of tools."""
    config = write_whole_run(tmp_path / "run", batches=3)

    def talk(batch):
        for rollout in batch.rollouts:
            rollout.completion = TALK

    rewrite_batch(config, 0, talk)
    return tmp_path / "run"


def journal_of(run: Path) -> list[tuple[int, Rollout]]:
    journal = Journal(run / "journal")
    return [(step, rollout) for step in journal.steps() for rollout in journal.read(step).rollouts]


def load(path: Path, cache: Path) -> list[dict]:
    """As TRL and verl do."""
    from datasets import Dataset

    loaded = Dataset.from_parquet(str(path), cache_dir=str(cache), keep_in_memory=True)
    return list(loaded)


def test_every_rollout_comes_out_with_all_that_the_journal_knows_of_it(run, tmp_path, capsys):
    assert rollouts([str(run), "--to", "parquet"]) == 0
    rows = load(run / "rollouts" / "parquet" / "rollouts.parquet", tmp_path)
    assert f"{len(rows):8}  {run}/rollouts/parquet/rollouts.parquet" in capsys.readouterr().out
    written = journal_of(run)
    assert len(rows) == len(written)
    for row, (step, rollout) in zip(rows, written, strict=True):
        assert (row["step"], row["group"], row["place"], row["env"]) == (
            step,
            rollout.group,
            rollout.place,
            rollout.env,
        )
        assert (row["reward"], row["answer"], row["truncated"]) == (rollout.reward, rollout.answer, rollout.truncated)
        assert {metric["name"]: metric["value"] for metric in row["metrics"]} == rollout.metrics
        assert row["masked"] == rollout.masked
        for sample, tokens in zip(row["samples"], rollout.samples, strict=True):
            for name, values in sample.items():
                assert np.array_equal(np.array(values, dtype=getattr(tokens, name).dtype), getattr(tokens, name))


def test_lines_of_json_say_the_same_as_columns(run, tmp_path):
    rollouts([str(run), "--to", "jsonl"])
    rollouts([str(run), "--to", "parquet"])
    lines = [json.loads(line) for line in (run / "rollouts/jsonl/rollouts.jsonl").read_text().splitlines()]
    for line, row in zip(lines, load(run / "rollouts/parquet/rollouts.parquet", tmp_path), strict=True):
        metrics = {metric["name"]: metric["value"] for metric in row.pop("metrics")}
        assert line.pop("metrics") == metrics
        assert [message["role"] for message in line.pop("completion")] == [m["role"] for m in row.pop("completion")]
        assert line == row


def test_trl_finds_its_columns_and_the_rewards_of_the_journal(run, tmp_path):
    rollouts([str(run), "--to", "trl", "--pass-threshold", "1.5"])
    sets = {path.stem: load(path, tmp_path) for path in (run / "rollouts" / "trl").iterdir()}
    written = [rollout for _, rollout in journal_of(run)]
    trained = [rollout for rollout in written if rollout.masked is None]
    assert {(row["env"], row["example"]) for row in sets["prompt_only"]} == {(r.env, r.example) for r in written}
    assert len(sets["prompt_only"]) == len({(r.env, r.example) for r in written})
    assert [row["reward"] for row in sets["prompt_completion"]] == [rollout.reward for rollout in written]
    assert [row["label"] for row in sets["unpaired_preference"]] == [rollout.reward >= 1.5 for rollout in written]
    samples = [sample for rollout in trained for sample in rollout.samples]
    assert [row["input_ids"] for row in sets["tokens"]] == [sample.ids.tolist() for sample in samples]
    assert [row["completion_mask"] for row in sets["tokens"]] == [sample.loss_mask.tolist() for sample in samples]
    for rows in sets.values():
        assert all(message["role"] for row in rows for message in row.get("prompt", []))


def test_of_each_group_the_best_is_paired_with_the_worst(run, tmp_path):
    rollouts([str(run), "--to", "trl"])
    pairs = load(run / "rollouts/trl/preference.parquet", tmp_path)
    groups: dict[int, list[Rollout]] = {}
    for _, rollout in journal_of(run):
        groups.setdefault(rollout.group, []).append(rollout)
    assert {len(group) for group in groups.values()} == {GROUP}
    differing = {number: group for number, group in groups.items() if len({r.reward for r in group}) > 1}
    assert [pair["group"] for pair in pairs] == list(differing)
    for pair, group in zip(pairs, differing.values(), strict=True):
        rewards = [rollout.reward for rollout in group]
        assert (pair["score_chosen"], pair["score_rejected"]) == (max(rewards), min(rewards))
        assert pair["margin"] == pytest.approx(max(rewards) - min(rewards))


def test_verl_finds_its_columns_and_prompt_and_response_make_up_the_sample(run, tmp_path):
    rollouts([str(run), "--to", "verl"])
    prompts = load(run / "rollouts/verl/train.parquet", tmp_path)
    written = journal_of(run)
    assert len(prompts) == len({(rollout.env, rollout.example) for _, rollout in written})
    assert prompts[0] == {
        "data_source": written[0][1].env,
        "prompt": [{"role": "user", "content": "say it"}],
        "ability": written[0][1].env,
        "reward_model": {"style": "rule", "ground_truth": "it"},
        "extra_info": {"split": "train", "index": written[0][1].example},
    }
    samples = [sample for _, rollout in written if rollout.masked is None for sample in rollout.samples]
    for row, sample in zip(load(run / "rollouts/verl/tokens.parquet", tmp_path), samples, strict=True):
        assert row["prompts"] + row["responses"] == sample.ids.tolist()
        assert row["response_mask"][0] == 1
        assert sum(row["response_mask"]) == sample.loss_mask.sum()
        assert row["rollout_log_probs"] == sample.logprobs[len(row["prompts"]) :].tolist()
        assert row["versions"] == sample.versions[len(row["prompts"]) :].tolist()
    talks = load(run / "rollouts/verl/sft.parquet", tmp_path)
    assert [message["role"] for message in talks[0]["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_messages_have_the_keys_that_some_message_of_the_run_has_and_no_others(run, tmp_path):
    rollouts([str(run), "--to", "trl"])
    row = load(run / "rollouts/trl/prompt_completion.parquet", tmp_path)[0]
    assert set(row["prompt"][0]) == {"role", "content"}
    called, returned, said = row["completion"]
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert called["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
    assert (called["content"], called["reasoning_content"]) == ("", "hm")
    assert (returned["tool_call_id"], returned["content"]) == ("1", "2\n[image_url]")
    assert (said["content"], said["tool_calls"]) == ("It is 2.", None)
    rollouts([str(run), "--to", "trl", "--steps", "1:", "--output", str(tmp_path / "plain")])
    plain = load(tmp_path / "plain" / "prompt_completion.parquet", tmp_path)[0]
    assert set(plain["completion"][0]) == {"role", "content"}


def test_a_chat_template_takes_the_messages(run, tmp_path):
    """As a user would: what is not there must not look as if it were."""
    from jinja2 import Template

    rollouts([str(run), "--to", "verl", "--steps", "1"])
    messages = load(run / "rollouts/verl/sft.parquet", tmp_path)[0]["messages"]
    template = Template(
        "{% for m in messages %}{{ m.role }}{% if 'tool_calls' in m %}!{% endif %}: {{ m.content }}|{% endfor %}"
    )
    assert template.render(messages=messages) == "user: say it|assistant: it|"


def test_steps_environment_and_reward_choose_together(run, tmp_path):
    options = ["--steps", "1:3", "--env", "a", "--min-reward", "1.0", "--no-tokens"]
    rollouts([str(run), "--to", "jsonl", *options, "--output", str(tmp_path / "some")])
    lines = [json.loads(line) for line in (tmp_path / "some" / "rollouts.jsonl").read_text().splitlines()]
    expected = [r for step, r in journal_of(run) if step in (1, 2) and r.env == "a" and r.reward >= 1.0]
    assert [(line["group"], line["place"]) for line in lines] == [(r.group, r.place) for r in expected]
    assert lines
    assert all(line["samples"] == [] for line in lines)


def test_what_cannot_be_written_is_refused_and_leaves_nothing(run, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"holds no batch - expected the folder of an `rl` run"):
        rollouts([str(tmp_path), "--to", "trl"])
    with pytest.raises(ConfigError, match=r"has steps 0 to 2, none of them was asked for"):
        rollouts([str(run), "--to", "trl", "--steps", "9:"])
    with pytest.raises(ConfigError, match=r"No rollout of .* is as asked for"):
        rollouts([str(run), "--to", "trl", "--env", "nowhere"])
    with pytest.raises(SystemExit):
        rollouts([str(run), "--to", "trl", "--steps", "a:b"])
    assert "'a:b' is no span of steps" in capsys.readouterr().err
    assert not (run / "rollouts").exists()
    rollouts([str(run), "--to", "verl"])
    with pytest.raises(ConfigError, match="is not empty"):
        rollouts([str(run), "--to", "verl"])


def test_a_damaged_batch_ends_it_and_leaves_nothing(run):
    entry = Journal(run / "journal").path(1)
    entry.write_bytes(entry.read_bytes()[:-5])
    with pytest.raises(JournalCorrupt, match="do not match its checksum"):
        rollouts([str(run), "--to", "trl"])
    assert not (run / "rollouts").exists()


def test_a_batch_that_is_gone_is_not_left_out_in_silence(run):
    Journal(run / "journal").path(1).unlink()
    with pytest.raises(JournalCorrupt, match=r"misses batch 1 of 2.*with `--steps`"):
        rollouts([str(run), "--to", "trl"])
    assert not (run / "rollouts").exists()
    assert rollouts([str(run), "--to", "jsonl", "--steps", "2:"]) == 0


def test_an_error_on_the_way_leaves_nothing(run, monkeypatch):
    monkeypatch.setattr(write.Parquet, "write", lambda self, rows: (_ for _ in ()).throw(RuntimeError("torn")))
    with pytest.raises(RuntimeError, match="torn"):
        rollouts([str(run), "--to", "trl"])
    assert list((run / "rollouts").iterdir()) == []


def test_a_batch_that_comes_meanwhile_is_left_for_another_time(run, monkeypatch):
    """The columns are known from what was there when it began."""
    seen = []
    there = write.steps_of

    def steps_of(*arguments):
        seen.append(there(*arguments))
        return seen[-1][:-1]

    monkeypatch.setattr(write, "steps_of", steps_of)
    rollouts([str(run), "--to", "jsonl"])
    assert len(seen) == 1
    lines = (run / "rollouts/jsonl/rollouts.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == {0, 1}


@pytest.mark.parametrize("kind", TABLES)
def test_every_row_has_the_columns_of_its_table(kind):
    sample = build_tokens(ids=[1, 2], loss_mask=[0, 0], logprobs=[0, 0], advantages=[0, 0], versions=[-1, -1])
    rollout = Rollout(group=1, place=0, attempt=0, env="a", example=3, reward=1.0, samples=[sample], temperature=1.0)
    other = Rollout(group=1, place=1, attempt=0, env="a", example=3, reward=0.0, samples=[], temperature=1.0)
    for table in TABLES[kind]:
        schema = table.schema(message_types(set(), optional_keys([{"role": "tool", "name": "x"}])))
        for row in table.rows(0, [rollout, other], Options()):
            assert list(row) == schema.names or set(row) == set(schema.names)
            pa.Table.from_pylist([row], schema=schema)


def test_calls_that_are_written_as_text_are_calls_too():
    row = to_rows([{"role": "assistant", "content": "", "tool_calls": ['{"name": "add", "arguments": "{}"}']}])[0]
    assert row["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
    torn = to_rows([{"role": "assistant", "tool_calls": ["{torn"]}])[0]
    assert torn["tool_calls"][0]["function"] == {"name": "", "arguments": "{torn"}


def test_the_files_are_parquet_that_others_can_read_in_parts(run):
    rollouts([str(run), "--to", "parquet"])
    file = parquet.ParquetFile(run / "rollouts/parquet/rollouts.parquet")
    assert file.num_row_groups == 3  # a batch each
