"""`trireme report`: one page for somebody who was not there. It needs nothing else, and says what the files say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from markdown_it import MarkdownIt

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.cli.report import report
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.written import write_run
from trireme.ledger.surroundings import write_surroundings
from trireme.monitor.metrics import MetricsFile
from trireme.monitor.report.choices import OWN, choices_of
from trireme.monitor.report.html import marked, to_html
from trireme.monitor.report.markdown import fenced, to_markdown
from trireme.monitor.report.page import Code, Conversation, Figure, Message, Page, Section, Table, Words
from trireme.monitor.report.plots import Line, line_figure, share_words, shares_figure, smooth, thinned
from trireme.monitor.report.sections import build_page
from trireme.monitor.spans import Span
from viewing import write_evaluations
from written_run import rewrite_batch, write_whole_run

DEADLINE_S = 60
EVIL = (
    '<script>alert(1)</script> ``` </pre> </details> <img src="http://example.org/x"> \u202e ![x](http://example.org/y)'
)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with evaluations, in which somebody said something evil."""
    folder = tmp_path_factory.mktemp("runs") / "a run"
    config = write_whole_run(folder)
    write_evaluations(folder)

    def speak(record: Any) -> None:
        for rollout in record.rollouts:
            rollout.completion = [{"role": "assistant", "content": EVIL}, {"role": '" onclick="x', "content": "so"}]

    rewrite_batch(config, 0, speak)
    return folder


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return build_page(run)


@pytest.fixture(scope="module")
def as_html(page: Page) -> str:
    return to_html(page)


@pytest.fixture(scope="module")
def as_markdown(page: Page) -> str:
    return to_markdown(page)


class Reader(HTMLParser):
    """As a browser reads it: elements with what they have, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}


def section(page: Page, title: str) -> Section:
    return next(section for section in page.sections if section.title == title)


def words(blocks: Any) -> str:
    return "\n".join(map(str, blocks))


# nothing else is needed


def test_the_html_loads_nothing(as_html: str) -> None:
    reader = Reader(as_html)
    assert reader.tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base", "form", "audio"})
    for tag, attributes in reader.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "data", "action"):
                assert (value or "").startswith("#"), (tag, name, value)
    assert set(re.findall(r"url\(([^)#]*)", as_html)) <= {""}
    assert "@import" not in as_html
    policy = next(attributes for tag, attributes in reader.elements if attributes.get("http-equiv"))
    assert (policy["content"] or "").startswith("default-src 'none';")


def test_what_a_model_wrote_is_text_in_html(as_html: str) -> None:
    reader = Reader(as_html)
    said = EVIL.replace("\u202e", "�")
    assert said in reader.texts
    assert all(attributes.get("class") != "message " + '" onclick="x' for _, attributes in reader.elements)


def test_what_a_model_wrote_is_text_in_markdown(as_markdown: str) -> None:
    """Read by somebody else's parser."""
    tokens = MarkdownIt("commonmark").enable("table").parse(as_markdown)
    said = EVIL.replace("\u202e", "�")
    assert sum(said in token.content for token in tokens if token.type == "fence") == 2
    assert not any(said in token.content for token in tokens if token.type != "fence")
    raw = [token.content.strip() for token in tokens if token.type == "html_block"]
    assert raw
    assert all(re.fullmatch(r"<details><summary>[\w ]+</summary>|</details>", line) for line in raw)


def test_markdown_holds_its_pictures(page: Page, as_markdown: str) -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(as_markdown)
    images = [child for token in tokens for child in token.children or () if child.type == "image"]
    figures = [block for one in page.sections for block in one.blocks if isinstance(block, Figure)]
    assert len(images) == len(figures) > 3
    assert all(str(image.attrs["src"]).startswith("data:image/png;base64,") for image in images)


def test_plots_lie_beside_the_markdown_where_that_is_wanted(run: Path, tmp_path: Path) -> None:
    assert report([str(run), "--out", str(tmp_path / "x" / "r.md"), "--figures", str(tmp_path / "plots")]) == 0
    links = re.findall(r"^!\[.*\]\((.*)\)$", (tmp_path / "x" / "r.md").read_text(), re.MULTILINE)
    assert "../plots/reward.svg" in links
    for link in links:
        assert ElementTree.parse(tmp_path / "x" / link).getroot().tag == f"{SVG}svg"


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    run = supervised_run(tmp_path)
    assert to_html(build_page(run)) == to_html(build_page(run))
    first, again = (to_markdown(build_page(run)) for _ in range(2))
    assert first == again


# what it says


def test_the_lead_says_what_the_files_say(run: Path, page: Page) -> None:
    rows = [json.loads(line) for line in RunPaths(run).metrics.read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert page.title == "a run"
    assert page.lead.startswith("5 of 5 steps")
    first, last = sum(rewards[:2]) / 2, sum(rewards[-2:]) / 2
    assert f"mean reward {first:.3f} → {last:.3f} (of the first and the last 2 steps)" in page.lead


def test_rollouts_are_of_the_first_the_middle_and_the_last_batch(page: Page) -> None:
    shown = [block for block in section(page, "Rollouts").blocks if isinstance(block, Conversation)]
    assert [each.title.partition(":")[0] for each in shown] == [
        *["at the start, step 1"] * 2,
        *["in the middle, step 3"] * 2,
        *["at the end, step 5"] * 2,
    ]
    groups = {each.title.partition(": ")[2].partition(",")[0] for each in shown[:2]}
    assert len(groups) == 2, "one of each group"


def test_the_held_out_example_that_gained_the_most_is_shown_before_and_after(page: Page) -> None:
    """`write_evaluations`: example 1 goes from 0 to 1, the others stay."""
    blocks = section(page, "Held-out examples").blocks
    assert blocks[0] == Words("Example 1 of say, which gained the most (+1):")
    shown = [block for block in blocks if isinstance(block, Conversation)]
    assert [each.title for each in shown] == ["version 0: reward 0", "version 20: reward 1"]
    assert shown[0].messages == [Message("user", "question 1"), Message("assistant", "version 0 says 1")]
    assert shown[1].messages == [Message("assistant", "version 20 says 1")]


def test_the_audit_says_that_all_holds_or_what_does_not(run: Path, page: Page, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    RunPaths(broken).journal.joinpath("batch_000002.msgpack").unlink()
    assert "Nothing was lost, and nothing was trained twice" in words(section(page, "Audit").blocks)
    said = words(section(build_page(broken), "Audit").blocks)
    assert "contradiction" in said
    assert "batch 2 is missing" in said
    assert not any(one.title == "Audit" for one in build_page(broken, audits=False).sections)


def test_warnings_are_told_in_words(run: Path, tmp_path: Path) -> None:
    warned = tmp_path / "warned"
    shutil.copytree(run, warned)
    MetricsFile(RunPaths(warned).metrics, "trainer").append(5, {"loss": float("nan"), "grad_norm": 1.0})
    assert "None: no sign" in words(section(build_page(run, audits=False), "Warnings").blocks)
    table = section(build_page(warned, audits=False), "Warnings").blocks[0]
    assert isinstance(table, Table)
    assert (table.rows[0][0], table.rows[0][1]) == ("6", "not_finite")
    assert "loss is not finite" in table.rows[0][2]


def test_versions_are_those_that_the_run_wrote_down(run: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    shutil.copytree(run, told)
    assert "did not write down" in words(section(build_page(told, audits=False), "Versions and machine").blocks)
    write_surroundings(RunPaths(told), {"packages": {"torch": "9.9"}, "command": ["rl", "@", "x.toml"], "gpus": []})
    table = section(build_page(told, audits=False), "Versions and machine").blocks[0]
    assert table == Table([("packages torch", "9.9"), ("command", "rl @ x.toml")])


# the configuration can be used


@pytest.mark.parametrize("file", ["reverse-text/rl.toml", "wordle/rl.toml", "math-python/rl.toml"])
def test_from_its_choices_comes_the_same_configuration(file: str, tmp_path: Path) -> None:
    original = resolve(load_run_config(["@", f"configs/{file}"], program="rl")[0], Devices(cores=2))
    written = tmp_path / "again.toml"
    written.write_text(choices_of(original))
    again = resolve(load_run_config(["@", str(written)], program="rl")[0], Devices(cores=8))
    assert without_own(again.model_dump(mode="json")) == without_own(original.model_dump(mode="json"))
    assert not tomllib.loads(written.read_text()).keys() & set(OWN)


def without_own(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    kept = {name: value for name, value in table.items() if f"{above}{name}" not in OWN}
    return {
        name: without_own(value, f"{above}{name}.") if isinstance(value, dict) else value
        for name, value in kept.items()
    }


# time


def write_spans(run: Path, spans: list[Span]) -> None:
    RunPaths(run).spans.write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))


def test_time_is_told_from_the_lanes(run: Path, tmp_path: Path) -> None:
    """Of 100 s the trainer trains 25 and waits 75 while the engine is busy 100."""
    laned = tmp_path / "laned"
    shutil.copytree(run, laned)
    trainer = [
        span
        for second in range(0, 100, 4)
        for span in (
            Span("trainer", "train", 1e9 + second, 1.0, step=second // 4),
            Span("trainer", "wait", 1e9 + second + 1, 3.0, step=second // 4, why="no batch yet"),
        )
    ]
    write_spans(laned, [*trainer, Span("engine 127.0.0.1:8000", "generate", 1e9, 100.0)])
    blocks = section(build_page(laned, audits=False), "Where the time went").blocks
    assert "the trainer waits 75% of the time" in words(blocks)
    assert "give more GPUs to inference" in words(blocks)
    assert Table([("trainer", "75%", "no batch yet")], head=("who waited", "of the time", "for what")) in blocks
    figure = next(block for block in blocks if isinstance(block, Figure))
    assert figure.alt == "trainer: wait 75 %, train 25 %; engine 127.0.0.1:8000: generate 100 %"


def test_without_lanes_time_is_told_from_what_the_trainer_measured(tmp_path: Path) -> None:
    run = supervised_run(tmp_path / "sft", {"time/step": 2.0, "time/forward_backward": 1.0, "time/optimizer": 0.5})
    blocks = section(build_page(run), "Where the time went").blocks
    assert "in 4 s of steps: train 75 %, other 25 %" in words(blocks)


# the plots


def drawn_lines(figure: Figure) -> list[np.ndarray]:
    """Corners of each line, in points, y upwards."""
    root = ElementTree.fromstring(figure.svg)
    lines = []
    for path in root.iter(f"{SVG}path"):
        style, drawing = path.get("style") or "", path.get("d") or ""
        if "fill: none" in style and "#1f5fa8" in style:
            numbers = re.findall(r"-?[\d.]+ -?[\d.]+", drawing)
            lines.append(np.array([[float(number) for number in pair.split()] for pair in numbers]) * [1, -1])
    return lines


def test_a_line_goes_through_its_values() -> None:
    """Whatever the scale is, what is drawn is an affine picture of the numbers."""
    values = [0.0, 3.0, 1.0, 4.0, 1.5, 9.0]
    (drawn,) = drawn_lines(line_figure("x", "X", [Line("x", list(enumerate(values)))]))
    for column, wanted in ((0, range(6)), (1, values)):
        scale, zero = np.polyfit(wanted, drawn[:, column], 1)
        assert scale > 0
        assert np.abs(np.polyval([scale, zero], wanted) - drawn[:, column]).max() < 0.01


def test_a_number_that_was_not_finite_is_a_gap() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, float("nan")), (3.0, 2.0), (4.0, 3.0)]
    figure = line_figure("x", "X", [Line("x", points)])
    assert "nan" not in figure.svg.lower()
    assert figure.alt == "x from 1 to 3 over steps 0 to 4"


def test_a_long_run_is_drawn_with_as_many_points_as_can_be_seen() -> None:
    points = [(float(step), step % 2.0) for step in range(100_000)]
    few = thinned(points, 800)
    assert len(few) == 800
    assert [y for _, y in few] == pytest.approx([0.5] * 800, abs=0.01)
    assert thinned(points[:800], 800) == points[:800]
    assert len(line_figure("x", "X", [Line("x", points)]).svg) < 100_000


def test_smoothing_takes_as_many_from_before_as_from_after() -> None:
    assert smooth([0, 3, 6, 0, 3], 3) == [0, 3, 3, 3, 3]
    assert smooth([1, float("nan"), 3], 3)[1] == 2


def test_shares_are_told_by_size() -> None:
    assert share_words({"wait": 0.38, "train": 0.62, "save": 0.001}) == "train 62 %, wait 38 %"
    figure = shares_figure("t", "T", {"trainer": {"train": 0.5, "unheard of": 0.5}})
    assert "unheard of" in figure.svg


@pytest.mark.parametrize("values", [[0.01, 1.0, 300.0], [0.3, 0.4, 0.6]], ids=["decades", "less than one"])
def test_a_scale_of_powers_is_in_plain_numbers(values: list[float]) -> None:
    low, high = values[0], values[-1]
    figure = line_figure("x", "X", [Line("x", [(float(n), value) for n, value in enumerate(values)])], log=True)
    drawn = [text.text or "" for text in ElementTree.fromstring(figure.svg).iter(f"{SVG}text")]
    assert not any("$" in text for text in drawn)
    assert sum(low <= float(text) <= high for text in drawn if re.fullmatch(r"[\d.]+", text)) >= 3


def test_names_are_drawn_as_they_are() -> None:
    names = ["cost$5$", "海", "a_b^c"]
    figure = line_figure("x", "X", [Line(name, [(0.0, 1.0), (1.0, 2.0)]) for name in names])
    drawn = {text.text for text in ElementTree.fromstring(figure.svg).iter(f"{SVG}text")}
    assert drawn >= set(names)


# runs of other kinds, and runs that have hardly begun


def supervised_run(folder: Path, more: dict[str, float] | None = None) -> Path:
    config = SftConfig(output_dir=folder, data="x.jsonl", max_steps=2)
    write_run(config, config.paths.run_config)
    metrics = MetricsFile(config.paths.metrics, "trainer")
    for step in range(2):
        metrics.append(step, {"loss": 2.0 - step, "grad_norm": 1.0, "validation/loss": 3.0 - step} | (more or {}))
    return folder


def test_supervised_training_has_a_page_too(tmp_path: Path) -> None:
    page = build_page(supervised_run(tmp_path / "sft"))
    assert page.lead == "2 of 2 steps in 0:00, from the first batch on; held-out loss 3 → 2."
    titles = [block.title for block in section(page, "Curves").blocks if isinstance(block, Figure)]
    assert {"Loss", "Loss on held-out data"} <= set(titles)
    assert not any(one.title in ("Rollouts", "Audit") for one in page.sections)
    assert "uv run sft @ again.toml" in words(section(page, "How to do it again").blocks)


def test_a_run_that_has_not_made_a_step_has_a_page(tmp_path: Path) -> None:
    config = RunConfig(output_dir=tmp_path / "fresh")
    write_run(config, config.paths.run_config)
    page = build_page(tmp_path / "fresh")
    assert page.lead == "0 of 100 steps."
    assert "No step has been measured yet" in to_html(page)


def test_a_run_that_goes_on_has_a_page(run: Path, tmp_path: Path) -> None:
    """Its newest line is half written, its newest batch is damaged, an evaluation is being written."""
    live = tmp_path / "live"
    shutil.copytree(run, live)
    paths = RunPaths(live)
    with open(paths.metrics, "a") as file:
        file.write('{"step": 5, "process": "trai')
    batch = paths.journal / "batch_000004.msgpack"
    batch.write_bytes(batch.read_bytes()[:-9])
    with open(paths.evals / "step_20" / "say.jsonl", "a") as file:
        file.write('{"example_id": 4, "rew')
    page = build_page(live)
    assert page.lead.startswith("5 of 5 steps")
    assert Words("Batch 4 cannot be read.") in section(page, "Rollouts").blocks


# pieces


def test_marks_are_code_and_nothing_else_is() -> None:
    assert marked("set `a.b` to <1>") == "set <code>a.b</code> to &lt;1&gt;"


@pytest.mark.parametrize("text", ["a", "```", "x\n````\ny", "`" * 7])
def test_a_fence_is_longer_than_any_in_it(text: str) -> None:
    (token,) = MarkdownIt().parse(fenced(text))
    assert token.type == "fence"
    assert token.content == text + "\n"


def test_in_markdown_a_text_has_its_code_and_no_other_marks() -> None:
    said = "a <b>*bold*</b> [x](y) `<c>*` and a_b_c"
    tokens = MarkdownIt("commonmark").parse(to_markdown(Page("t", said, [])))
    children = tokens[-2].children or []
    assert [child.type for child in children if child.type != "text"] == ["code_inline"]
    assert "".join(child.content for child in children) == said.replace("`", "")


def test_cells_stay_in_their_columns() -> None:
    page = Page("t", "l", [Section("s", [Table([("a|b", "c\nd")], head=("x",)), Code("1")])])
    tokens = MarkdownIt("commonmark").enable("table").parse(to_markdown(page))
    cells = [token.content for index, token in enumerate(tokens) if tokens[index - 1].type == "td_open"]
    assert cells == ["a|b", "c d"]


# the command


def test_the_page_lies_in_the_run_where_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = supervised_run(tmp_path / "sft")
    assert report([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert Reader((run / "report.html").read_text()).texts.count("Loss") == 1


def test_rollouts_are_left_out_where_none_are_wanted(run: Path) -> None:
    titles = [one.title for one in build_page(run, num_rollouts=0, audits=False).sections]
    assert "Rollouts" not in titles
    assert "Audit" not in titles


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            lambda run, tmp: [run, "--out", f"{tmp}/r.pdf"],
            r"is written as \.html or \.md - expected a name",
        ),
        (lambda run, tmp: [run, "--out", f"{tmp}/r.html", "--figures", f"{tmp}/f"], r"expected it with a \.md"),
        (lambda run, tmp: [run, "--out", f"{run}/metrics.jsonl/r.html"], r"expected a place that can be written to"),
        (lambda run, tmp: [str(tmp)], r"is not a run's folder"),
        (lambda run, tmp: [f"{tmp}/nowhere"], r"is not a run's folder"),
    ],
    ids=["kind", "figures", "place", "no run", "nothing"],
)
def test_what_cannot_be_written_is_refused(
    run: Path, tmp_path: Path, arguments: Callable[[str, Path], list[str]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        report([*arguments(str(run), tmp_path), "--no-audit"])
    assert list(tmp_path.iterdir()) == []


def test_help_loads_no_library_for_plots() -> None:
    code = "import sys, trireme.cli.report; print(*{'matplotlib', 'jinja2', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.split() == []
