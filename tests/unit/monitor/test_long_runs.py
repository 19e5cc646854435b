"""A long file of metrics is read in pieces by every process that reads it."""

import json
import tracemalloc
from collections.abc import Callable

import pytest
from rich.console import Console

from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.launch import restarts
from trireme.launch.restarts import Trained
from trireme.monitor import metrics
from trireme.monitor.metrics import MetricsFile
from trireme.monitor.status import StatusPoller
from trireme.monitor.view import View
from trireme.orchestrator.watcher import Watcher
from trireme.tools.cluster.status import look_at
from trireme.tools.dashboard import history
from trireme.tools.dashboard.runs import RunFolder


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(restarts, "LAST_BYTES", 4096)
    for module in (history, metrics):
        monkeypatch.setattr(module, "PIECE_BYTES", 4096)


def read_whole(run: RunFolder) -> None:
    while run.refresh():
        pass
    assert run.metrics.series("name/19").values.tolist() == [0.5]


READERS: dict[str, Callable[[RunConfig], object]] = {
    "dashboard": lambda config: read_whole(RunFolder(config.paths.root, "run")),
    "view": lambda config: View(config, StatusPoller("", config.paths.root), Console(quiet=True)).tick((), final=True),
    "status": lambda config: look_at(config.paths.root),
    "restarts": lambda config: Trained(config.paths.metrics).newest(),
    "warnings": lambda config: Watcher(MetricsFile(config.paths.metrics, "orchestrator")).look(),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_long_file_of_metrics_is_read_in_pieces(reader, tmp_path):
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
