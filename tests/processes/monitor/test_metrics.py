"""`metrics.jsonl` and its mirror."""

import ast
import json
import math
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from rich.console import Console

from support.models.tiny import open_state, random_samples, train_step
from support.processes.limits import file_size_limit
from support.processes.parsing import parse
from support.runs.whole_run import build_config, run
from trireme.base.errors import ConfigError
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.launch import restarts
from trireme.launch.restarts import Trained
from trireme.monitor import lines, metrics, wandb_mirror
from trireme.monitor.collapse import SIGNS
from trireme.monitor.metrics import MetricsFile, latest_by_step, merge_processes, read_metrics
from trireme.monitor.status import StatusPoller
from trireme.monitor.view import View
from trireme.monitor.wandb_mirror import open_wandb_mirror
from trireme.orchestrator.loop import restore_metrics
from trireme.orchestrator.watcher import Watcher
from trireme.tools.cluster.status import look_at
from trireme.tools.dashboard import history
from trireme.tools.dashboard.runs import RunFolder


def test_metrics_row_reads_back_with_null_for_nan_and_infinity(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == ([], 0)
    numbers = {"loss": np.float32(0.5), "num_tokens": 7, "a": math.nan, "b": math.inf, "c": -math.inf}
    MetricsFile(path, "trainer").append(3, numbers)
    (row,), offset = read_metrics(path)
    assert row.pop("time_s") > 0
    none = dict.fromkeys("abc")
    assert row == {"step": 3, "process": "trainer", "loss": 0.5, "num_tokens": 7} | none
    assert read_metrics(path, offset) == ([], offset)
    path.write_text('{"step": 5, "process": "trainer"}\n')  # a new file in the place of the old
    assert [row["step"] for row in read_metrics(path, offset)[0]] == [5]


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)[0]]


def test_metrics_line_cut_at_any_byte_is_never_misread(tmp_path):
    probe = MetricsFile(tmp_path / "probe.jsonl", "trainer")
    probe.append(1, {"loss": 0.5})
    length = probe.path.stat().st_size
    for room in range(length + 1):
        metrics = MetricsFile(tmp_path / f"{room}.jsonl", "trainer")
        metrics.append(0, {})
        with file_size_limit(metrics.path.stat().st_size + room):
            metrics.append(1, {"loss": 0.5})
            assert steps_in(metrics.path) in ([0], [0, 1])
            reader, offset = read_metrics(metrics.path)
        metrics.append(2, {})
        reader += read_metrics(metrics.path, offset)[0]
        assert sorted({row["step"] for row in reader}) == [0, 1, 2]
        assert {row["loss"] for row in reader if row["step"] == 1} == {0.5}
        assert steps_in(metrics.path) == [row["step"] for row in reader]


def test_metrics_waiting_for_disk_space_lose_only_the_oldest_rows(tmp_path, monkeypatch):
    full = tmp_path / "full"
    full.touch()
    monkeypatch.setenv("TRIREME_FAULTS", f"disk_full={full}")
    monkeypatch.setattr(lines, "MOST_WAITING", 3)
    metrics = MetricsFile(tmp_path / "metrics.jsonl", "trainer")
    for step in range(5):
        metrics.append(step, {})
    assert (metrics.waiting, metrics.lost) == (3, 2)
    full.unlink()
    metrics.close()
    assert steps_in(metrics.path) == [2, 3, 4]


def test_a_full_disk_ends_no_training_and_warns_once_a_minute(caplog, monkeypatch):
    monkeypatch.setattr(lines, "CLOSE_S", 0.0)
    metrics = MetricsFile(Path("/dev/full"), "trainer")
    for step in range(3):
        metrics.append(step, {"loss": 1.0})
    assert len(set(caplog.messages)) == 1
    monkeypatch.setattr(lines, "WARN_EVERY_S", 0.0)
    metrics.append(3, {"loss": 1.0})
    assert (metrics.waiting, metrics.lost) == (4, 0)
    assert "/dev/full" in caplog.messages[0]
    assert "4 lines wait" in caplog.messages[-1]
    metrics.close()
    assert (metrics.waiting, metrics.lost) == (0, 4)


def test_latest_metrics_of_each_process_count_for_a_step():
    rows = [
        {"step": 4, "process": "trainer", "loss": 9.0, "time/step": 2.0},
        {"step": 4, "process": "orchestrator", "reward/mean": 0.1, "time/step": 1.0},
        {"step": 4, "process": "trainer", "loss": 1.0},  # trained again after a resume
        {"step": 4, "process": "orchestrator", "eval/words/reward": 0.7},
    ]
    latest = latest_by_step(rows)
    assert latest["trainer", 4]["loss"] == 1.0
    assert latest["orchestrator", 4] == rows[1] | rows[3]
    merged = merge_processes(rows[:2])
    assert (merged["time/step"], merged["reward/mean"], merged["step"]) == (2.0, 0.1, 4)


def read_whole(run: RunFolder) -> None:
    while run.refresh():
        pass
    assert run.metrics.series("name/19").values.tolist() == [0.5]


READERS: dict[str, Callable[[RunConfig], object]] = {
    "dashboard": lambda config: read_whole(RunFolder(config.paths.root, "run")),
    "view": lambda config: View(config, StatusPoller("", config.paths.root), Console(quiet=True)).tick((), final=True),
    "status": lambda config: look_at(config.paths.root),
    "restarts": lambda config: Trained(config.paths.metrics).newest(),
    "resume": lambda config: restore_metrics(
        config, Journal(config.paths.journal), MagicMock(), MetricsFile(config.paths.metrics, "orchestrator")
    ),
    "warnings": lambda config: Watcher(MetricsFile(config.paths.metrics, "orchestrator")).look(),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_long_file_of_metrics_is_read_in_pieces(reader, tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "LAST_BYTES", 4096)
    for module in (history, metrics):
        monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    config = RunConfig.model_validate({"output_dir": str(tmp_path)})
    write_run(config, config.paths.run_config)
    row = {"step": 1, "process": "trainer", "time_s": 1.0} | {f"name/{n}": 0.5 for n in range(20)}
    config.paths.metrics.write_text(json.dumps(row) + "\n")
    READERS[reader](config)  # imports take memory too
    config.paths.metrics.write_text((json.dumps(row) + "\n") * 2000)
    tracemalloc.start()
    READERS[reader](config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < config.paths.metrics.stat().st_size / 4


def test_a_mirror_that_is_killed_goes_on_where_it_was(tmp_path, monkeypatch):
    rows: list[list[dict[str, Any]]] = []
    ids: list[str | None] = []

    def init(_: RunConfig, run_id: str | None) -> Any:
        ids.append(run_id)
        rows.append([])
        return SimpleNamespace(id="one", log=rows[-1].append)

    monkeypatch.setattr(wandb_mirror, "_init", init)
    config = wandb_config(tmp_path, "offline")
    config.paths.root.mkdir(exist_ok=True)
    orchestrator, trainer = (MetricsFile(config.paths.metrics, name) for name in ("orchestrator", "trainer"))
    for _ in range(2):
        orchestrator.append(1, {"reward/mean": 0.5})
        trainer.append(0, {"loss": 1.0, "grad_norm": math.nan})
        wandb_mirror._Mirror(config)._mirror()
    assert rows == [[{"step": 1, "reward/mean": 0.5}, {"step": 0, "loss": 1.0}]] * 2
    assert ids == [None, "one"], "the same wandb run"


def test_wandb_is_told_the_place_of_the_run(tmp_path, monkeypatch):
    said: dict[str, Any] = {}
    monkeypatch.setattr("wandb.init", lambda **given: said.update(given) or SimpleNamespace(define_metric=MagicMock()))
    table = {"mode": "offline", "project": "p", "entity": "team", "group": "ablation", "tags": ["a", "b"]}
    wandb_mirror._init(RunConfig.model_validate({"output_dir": tmp_path, "name": "one", "wandb": table}), None)
    expected = {"project": "p", "entity": "team", "name": "one", "group": "ablation", "tags": ("a", "b")}
    assert said.items() >= expected.items()


def test_wandb_that_cannot_start_is_a_configuration_error(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_MODE", "online")
    mirror = open_wandb_mirror(wandb_config(tmp_path, "online"))
    with pytest.raises(ConfigError, match=r"--wandb\.mode offline"), mirror:
        pass


def test_wandb_that_fails_later_ends_only_the_mirror(tmp_path, caplog):
    config = wandb_config(tmp_path, "offline")
    with open_wandb_mirror(config):
        import wandb

        assert wandb.run is not None
        wandb.run.finish()  # from now on wandb refuses what is logged
        MetricsFile(config.paths.metrics, "trainer").append(0, {"loss": 1.0})
    assert "wandb failed" in caplog.text
    assert len([*config.paths.root.glob("wandb/offline-run-*/*.wandb")]) == 1


def wandb_config(folder: Path, mode: str) -> RunConfig:
    return RunConfig.model_validate({"output_dir": str(folder), "name": "demo", "wandb": {"mode": mode}})


REPOSITORY = Path(__file__).parents[3]
PACKAGES = ("algo", "orchestrator", "trainer", "monitor", "base", "launch")

# In this run: what the environment below measures itself is called "odd".
WILD = {"ENV": r"[^/]+", "METRIC": "odd", "REASON": r"\w+", "NAME": r"\w+", "PROCESS": r"\w+", "K": r"\d+"}
PLACEHOLDER = re.compile(rf"\b(?:{'|'.join(WILD)})\b")

CODE = """
    def dataset():
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]

    def eval_dataset():
        return [{"prompt": f"held out {i}", "answer": str(i)} for i in range(2)]

    def reward(completion, answer):
        if len(completion) == 3:
            raise ValueError("three")
        return {"reward": len(completion) % 2, "odd": len(completion) % 2}
"""

TABLES = (REPOSITORY / "docs" / "metrics.md").read_text().split("## Warnings")[0]
CELLS = re.findall(r"^\| (`[^|]*`) \|", TABLES, re.MULTILINE)
DOCUMENTED = {name for cell in CELLS for name in re.findall(r"`([^`]+)`", cell)}


def is_documented(name: str) -> bool:
    patterns = (PLACEHOLDER.sub(lambda found: WILD[found[0]], re.escape(doc)) for doc in DOCUMENTED)
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def test_every_metric_that_a_run_writes_is_documented(tmp_path, tiny_model, world):
    sections = {
        "eval": {"rollouts_per_example": 2, "sampling": {"temperature": 1.0}},
        "buffer": {"pools": {}, "online_difficulty_filtering": True}, "curriculum": [{"weights": {"say": 1.0}}],
    }  # fmt: skip
    config = build_config(tmp_path, CODE, max_steps=2, orchestrator=sections)
    assert run(config).error is None
    written = {name for row in read_metrics(config.paths.metrics)[0] for name in row} - {"step", "process", "time_s"}
    assert len(written) > 40
    written |= set(train_step(open_state(tiny_model, world), random_samples([12, 9]), world))
    files = (REPOSITORY / "src" / "trireme" / "trainer").rglob("*.py")
    spans = {name for file in files for name in re.findall(r"_?timer\.(?:span|add)\(\s*\"(\w+)\"", file.read_text())}
    written |= {f"time/{span}" for span in spans} | {name for sign in SIGNS for name in sign.watched}
    assert written >= {"loss", "time/forward_backward"}
    assert {name for name in written if not is_documented(name) and not name.startswith("fake/")} == set()


def words_of_the_source() -> set[str]:
    """Its strings; what an f-string fills in is a star."""
    words = set()
    files = [file for name in PACKAGES for file in (REPOSITORY / "src" / "trireme" / name).rglob("*.py")]
    for file in files:
        for node in ast.walk(parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                words.add("".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values))
    return words


def test_every_documented_metric_is_one_that_the_source_writes():
    assert len(DOCUMENTED) > 80
    words = words_of_the_source()
    for name in DOCUMENTED:
        starred = PLACEHOLDER.sub("*", name)
        last = starred.rsplit("/", 1)[-1]  # of a name that is put together
        assert words & {starred, last, last.removesuffix("_frac")}, name
