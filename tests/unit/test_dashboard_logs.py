"""Logs and warnings in the dashboard: what was said, as text and nothing else."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.monitor.collapse import Watch
from trireme.monitor.dashboard.log_text import TAIL_BYTES, clean, kind_of, log_files, tail, to_html
from trireme.monitor.dashboard.signs import Signs
from trireme.monitor.metrics import MetricsFile, read_metrics


class Read(HTMLParser):
    """As a browser does."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])), st.sampled_from(["", "a", "<b> &", "error script"]))
def test_whatever_a_process_wrote_is_shown_as_text(line: str, words: str) -> None:
    page = Read(to_html([line], words))
    assert page.tags <= {"span", "mark"}
    assert page.text == line


def test_what_was_looked_for_is_marked() -> None:
    assert to_html(["a <Reward> b"], "reward") == "a &lt;<mark>Reward</mark>&gt; b"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("\x1b[32mINFO\x1b[0m fine", "INFO fine"),
        (" 10%|# \r 50%|#####", " 50%|#####"),
        ("windows\r", "windows"),
        ("bell \x07 \x00", "bell � �"),
    ],
)
def test_a_line_is_shown_without_what_terminals_are_told_in_it(written: str, shown: str) -> None:
    assert clean(written) == shown


def test_a_line_without_end_is_cut() -> None:
    assert clean("x" * 5000).endswith("… (3000 characters more)")


def test_of_a_long_log_the_newest_whole_lines_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "trainer.stdout"
    log.write_text("".join(f"line {number:06}\n" for number in range(100_000)))
    shown = tail(log, most=10)

    assert shown.lines == [f"line {number:06}" for number in range(99_990, 100_000)]
    assert not shown.is_whole
    assert shown.num_found == (TAIL_BYTES - 1) // 12


def test_a_filter_finds_what_is_far_back(tmp_path: Path) -> None:
    log = tmp_path / "trainer.stdout"
    lines = [f"line {number:06}" for number in range(100_000)]
    lines[7] = "01:02:03 WARNING trainer | Low Memory"
    lines[9] = "ValueError: low"
    log.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe broken\n")

    assert tail(log, words="MEMORY low").lines == [lines[7]]
    assert tail(log, level="errors").lines == [lines[9]]
    assert tail(log, level="trouble").lines == [lines[7], lines[9]]
    assert tail(tmp_path / "none").lines == []


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("12:00 INFO x | no error", ""),
        ("RuntimeError: x", "bad"),
        ("FutureWarning: y", "warn"),
        ("Traceback (most", "bad"),
    ],
)
def test_trouble_is_told_by_its_words(line: str, kind: str) -> None:
    assert kind_of(line) == kind


def test_logs_of_the_rooms_come_first(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("environment-x-0", "trainer", "inference-1", "orchestrator"):
        (tmp_path / "logs" / f"{name}.stdout").touch()
    assert list(log_files(tmp_path)) == ["orchestrator", "trainer", "inference-1", "environment-x-0"]


def collapsing(path: Path) -> Path:
    metrics = MetricsFile(path, "trainer")
    for step in range(40):
        entropy, norm = 1.0 if step < 20 else 0.0001, 500.0 if step == 30 else 1.0
        metrics.append(step, {"policy/entropy": entropy, "grad_norm": norm})
    return path


def test_the_dashboard_warns_of_what_the_run_itself_warned_of(tmp_path: Path) -> None:
    path = collapsing(tmp_path / "metrics.jsonl")
    watch = Watch()
    for row in read_metrics(path)[0]:
        watch.take(row)
    signs = Signs(path)

    assert signs.refresh()
    assert not signs.refresh()
    assert {finding.warned for finding in signs.findings()} == set(watch.said)
    first = signs.findings()[0]
    assert (first.warned.name, first.lasts) == ("entropy_collapse", True)


def test_a_warning_is_taken_apart_into_what_it_is_made_of(tmp_path: Path) -> None:
    signs = Signs(collapsing(tmp_path / "metrics.jsonl"))
    signs.refresh()
    for finding in signs.findings():
        assert f"{finding.seen} {finding.meaning} {finding.advice}" == finding.warned.text
        assert finding.metric in ("policy/entropy", "grad_norm")
