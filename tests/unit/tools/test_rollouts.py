"""What the viewer is made of: files of results, conversations, filters, tokens, pictures."""

import json
import os
from pathlib import Path

from tokenizers import Tokenizer

from support.models.tiny_tokenizer import write_tokenizer
from support.runs.viewing import answer, write_evaluations, write_results
from support.runs.written_run import write_whole_run
from trireme.orchestrator.evaluation.results import EvalResult, write_eval_results
from trireme.tools.rollouts import CHUNK, PREVIEW, ResultsFile, record_of
from trireme.tools.run_reader import RunReader
from trireme.tools.tokenizer import pieces
from trireme.tools.viewer.panes import page
from trireme.tools.viewer.sources import find_sources, run_title


def read_all(path: Path) -> ResultsFile:
    file = ResultsFile(path)
    while file.read_more():
        pass
    return file


def test_what_an_evaluation_writes_is_what_the_list_shows(tmp_path):
    prompt, completion = [{"role": "user", "content": "why?"}], [{"role": "assistant", "content": "because"}]
    scored = {"example_id": 3, "rollout": 2, "reward": 0.5, "answer": "so", "metrics": {"close": 0.25}, "version": 20}
    written = EvalResult(
        **scored, prompt=prompt, completion=completion, tokens=87, turns=2, truncated=True, stop="length"
    )
    write_eval_results(tmp_path / "say.jsonl", [written, EvalResult(example_id="x", reward=None, error="timeout")])
    file = read_all(tmp_path / "say.jsonl")
    row, failed = file.rows
    assert (row.example, row.rollout, row.reward, row.tokens, row.turns) == ("3", 2, 0.5, 87, 2)
    assert (row.truncated, row.stop, row.question, row.last_message) == (True, "length", "why?", "because")
    assert (failed.example, failed.reward, failed.error) == ("x", None, "timeout")
    record = file.record(row)
    assert (record.answer, record.metrics, record.row, record.more) == ("so", {"close": 0.25}, row, {"version": 20})


def test_a_large_file_is_read_in_parts_and_no_conversation_stays_in_memory(tmp_path):
    said = ["x" * (2 * CHUNK), *["word " * 20_000] * 200]  # one line is longer than a part
    file = ResultsFile(write_results(tmp_path / "long.jsonl", [answer(n, 0.5, each) for n, each in enumerate(said)]))
    parts = 1
    while file.read_more():
        assert len(file.rows) < 201
        parts += 1
    assert parts > os.path.getsize(file.path) / CHUNK - 2 > 2
    assert [row.example for row in file.rows] == [str(n) for n in range(201)]
    assert max(len(row.last_message) for row in file.rows) <= PREVIEW
    assert file.record(file.rows[137]).completion[0]["content"] == said[137]
    file.path.write_bytes(b"")
    assert "is not there any more" in file.record(file.rows[0]).more["gone"]


def test_a_last_line_counts_once_it_is_whole_with_or_without_its_end(tmp_path):
    path = write_results(tmp_path / "growing.jsonl", [answer(0, 0.5)])
    before, line = path.read_bytes(), json.dumps(answer(1, 0.5)).encode()
    file = read_all(path)
    for end in range(1, len(line)):
        path.write_bytes(before + line[:end])
        file.read_more()
        assert (len(file.rows), file.damaged) == (1, [])
    whole, damaged = before + line + b"\n", b'{"example_id": 1, "rew\n[1, 2]\n\xff\xfe\n'
    for content, rows, found in ((before + line, 2, []), (whole + line + b"\n", 3, []), (whole, 2, [3, 4, 5])):
        path.write_bytes(content + damaged * bool(found))
        file.read_more()
        assert ([row.rollout for row in file.rows], file.damaged) == ([0] * rows, found)


def test_eval_view_finds_runs_and_evaluations_but_skips_weights(tmp_path):
    run = write_whole_run(tmp_path / "run", batches=3).paths
    write_evaluations(run.root)
    write_results(tmp_path / "evals" / "say--org--model" / "8f2c" / "results.jsonl", [answer(0, 1.0)])
    write_results(run.weights / "step_1" / "say.jsonl", [answer(0, 1.0)])
    (run.journal / "set_aside_1").mkdir()
    (run.journal / "set_aside_1" / "batch_000009.msgpack").write_bytes(b"")
    sources = find_sources([tmp_path])
    assert [(one.run, one.series, one.label) for one in sources] == [
        (tmp_path, "say--org--model", "8f2c"),
        *((run.root, "training", f"step {step}") for step in range(3)),
        *((run.root, "say", f"step {step}") for step in (0, 20)),
    ]
    assert [run_title(folder, [tmp_path]) for folder in (tmp_path, run.root)] == [tmp_path.name, f"{tmp_path.name}/run"]


def test_reasoning_calls_of_tools_and_what_they_returned_are_read_in_order():
    calls = [{"id": "a", "function": {"name": "python", "arguments": '{"code": "print(6*7)\\nx"}'}}]
    completion = [
        {"role": "assistant", "content": "<think>I shall compute.</think>", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    record = record_of(answer(0, 1.0, completion=completion, info={"level": 3}, error=None), number=0)
    shown = [text.plain for text, _ in page(record, longest=None) if text.plain]
    assert shown[shown.index("━━ completion ") + 1 :] == [
        *("▌ assistant reasoning", "I shall compute.", "▌ assistant calls python", "code:\nprint(6*7)\nx"),
        *("▌ tool returned python", "42", "▌ assistant", "It is 42.", "━━ also ", 'info: {"level": 3}'),
    ]


def test_token_pieces_make_up_the_text_that_was_encoded(tmp_path):
    assert RunReader(tmp_path).decoder() is None
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run.json").write_text('{"model": {"name": "../no model/at all"}}')
    assert RunReader(tmp_path).decoder() is None
    folder = tmp_path / "weights" / "step_3"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{torn")
    assert RunReader(tmp_path).decoder() is None
    assert pieces([17, 4], None) == ["17 ", "4 "]
    write_tokenizer(folder)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("say 12", add_special_tokens=False).ids
    assert "".join(pieces(ids, RunReader(tmp_path).decoder())) == "say 12"
