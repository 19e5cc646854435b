"""`trireme report`: one page that needs nothing else, with the numbers of the run's files."""

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tiny_pictures import picture_file, shown
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.cli.runs.report import report
from trireme.config.files import write_run
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.journal.pictures import PictureFiles, pictures_folder
from trireme.journal.provenance import write_provenance
from trireme.monitor.metrics import MetricsFile
from trireme.monitor.spans import Span
from trireme.tools.diff.configuration import compare_configurations
from trireme.tools.report.sections import OWN, Run, build_report, choices_of
from trireme.tools.report.writing import Report, block, folded, paragraphs, prose, table, to_html
from viewing import Reader
from written_run import rewrite_batch, write_whole_run

EVIL = '<script>alert(1)</script> ``` </pre> </details> <img src="http://x.org/x"> \u202e ![x](http://example.org/y)'
SHOWN = EVIL.replace("\u202e", "�")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, in which a model was shown a picture and said something evil."""
    config = write_whole_run(tmp_path_factory.mktemp("runs") / "a run")
    digest = PictureFiles(pictures_folder(config.paths.journal)).add(picture_file(900, 90))

    def speak(record: Any) -> None:
        for rollout in record.rollouts:
            rollout.prompt[-1]["content"] = [shown(digest)]
            rollout.completion = [{"role": "assistant", "content": EVIL}, {"role": '" onclick="x', "content": "so"}]

    rewrite_batch(config, 0, speak)
    return config.paths.root


@pytest.fixture(scope="module")
def page(run: Path) -> Report:
    return build_report(run)


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> RunPaths:
    return RunPaths(Path(shutil.copytree(run, tmp_path / "copy")))


def words(page: Report, title: str) -> str:
    """The texts of a section: those of a line of a table, or of a block, are apart by spaces."""
    return " ".join(text for text in Reader(page.sections[title]).texts if text.strip())


def plots_of(page: Report) -> list[str]:
    elements = Reader("".join(page.sections.values())).elements
    return [attributes["aria-label"] or "" for _, attributes in elements if attributes.get("role") == "img"]


def test_html_loads_nothing_and_what_a_model_wrote_is_text(page: Report) -> None:
    as_html = to_html(page)
    reader = Reader(as_html)
    assert reader.tags.isdisjoint({"script", "link", "iframe", "object", "embed", "base", "form", "audio"})
    for tag, attributes in reader.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "data", "action"):
                assert (value or "").startswith("data:image/png;" if tag == "img" else "#"), (tag, name, value)
    assert set(re.findall(r"url\(([^)#]*)", as_html)) <= {""}
    assert "@import" not in as_html
    pictures = [attributes for tag, attributes in reader.elements if tag == "img"]
    assert [(each["width"], each["height"]) for each in pictures] == [("320", "32")] * 2
    policy = next(attributes for _, attributes in reader.elements if attributes.get("http-equiv"))
    assert (policy["content"] or "").startswith("default-src 'none';")
    assert sum(SHOWN in text for text in reader.texts) == 2
    for part in (prose(EVIL), block(EVIL), table([[EVIL]], [EVIL]), paragraphs([EVIL]), folded(EVIL, block(""))):
        shown = Reader(part)
        assert shown.tags.isdisjoint({"script", "img"})
        assert "<script>alert(1)</script>" in "".join(shown.texts)
    assert prose("set `a.b` to <1>") == "set <code>a.b</code> to &lt;1&gt;"


def test_the_page_says_what_the_files_say(run: Path, page: Report) -> None:
    rows = [json.loads(line) for line in RunPaths(run).metrics.read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    first, last = sum(rewards[:2]) / 2, sum(rewards[-2:]) / 2
    assert page.title == "a run"
    assert page.lead.startswith("5 of 5 steps")
    assert f"mean reward {first:.3f} → {last:.3f} (of the first and the last 2 steps)" in page.lead
    shown = re.findall(r"(at the \w+|in the \w+), step (\d): example (\d+)", words(page, "Rollouts"))
    places = [("at the start", "1"), ("in the middle", "3"), ("at the end", "5")]
    assert [place for *place, _ in map(list, shown)] == [list(place) for place in places for _ in range(2)]
    assert shown[0][2] != shown[1][2], "one of each group"
    assert "nothing was lost, and nothing was trained twice" in words(page, "Audit")
    assert "None: no sign" in words(page, "Warnings")
    assert "did not write down" in words(page, "Versions and machine")


def test_the_page_tells_what_went_wrong_and_where_it_ran(copy: RunPaths) -> None:
    copy.journal.joinpath("batch_000002.msgpack").unlink()
    MetricsFile(copy.metrics, "trainer").append(5, {"loss": float("nan"), "grad_norm": 1.0})
    write_provenance(copy, {"packages": {"torch": "9.9"}, "command": ["rl", "@", "x.toml"], "gpus": []})
    run = Run(copy.root)
    for section, expected in (
        (run.audit(), "batch 2 is missing"),
        (run.warnings(), " 6 not_finite loss is not finite"),
        (run.surroundings(), "packages.torch 9.9 command rl @ x.toml"),
    ):
        assert expected in words(Report("", "", {"": paragraphs(section)}), "")


def test_from_its_choices_comes_the_same_configuration(tmp_path: Path) -> None:
    original = resolve(load_run_config(["@", "configs/math-python/rl.toml"], program="rl")[0], Devices(cores=2))
    written = tmp_path / "again.toml"
    written.write_text(choices_of(original))
    again = resolve(load_run_config(["@", str(written)], program="rl")[0], Devices(cores=8))
    differing = compare_configurations(original.model_dump(mode="json"), again.model_dump(mode="json"))
    assert [key.key for key in differing if not key.key.startswith(OWN)] == []
    assert not tomllib.loads(written.read_text()).keys() & set(OWN)


def test_time_is_told_from_the_spans(copy: RunPaths) -> None:
    """Of 100 s the trainer trains 25 and waits 75 while the engine is busy 100. Their start counts for nothing."""
    copy.metrics.write_text("")  # without metrics there is nothing to plot, which takes most of the time
    spans = [Span("trainer", "start", 1e9 - 60, 60.0), Span("engine 127.0.0.1:8000", "generate", 1e9, 100.0)]
    for begin_s in range(0, 100, 4):
        spans.append(Span("trainer", "train", 1e9 + begin_s, 1.0, step=begin_s))
        spans.append(Span("trainer", "wait", 1e9 + begin_s + 1, 3.0, step=begin_s, why="no batch yet"))
    copy.spans.write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))
    page = build_report(copy.root, num_rollouts=0, audits=False)
    assert not {"Rollouts", "Audit"} & page.sections.keys()
    told = words(page, "Where the time went")
    for part in ("Over 100 s, from the first step", "the trainer waits 75% of the time", "trainer 75% no batch yet"):
        assert part in told
    assert "trainer wait 75%, train 25% engine 127.0.0.1:8000 generate 100%" in told


def test_supervised_training_has_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run = SftConfig(output_dir=tmp_path / "sft", data="x.jsonl", max_steps=2), tmp_path / "sft"
    write_run(config, config.paths.run_config)
    for step in range(2):
        row = {"loss": 2.0 - step, "grad_norm": 1.0, "validation/loss": 3.0 - step}
        MetricsFile(config.paths.metrics, "trainer").append(step, row)
    page = build_report(run)
    assert page.lead == "2 of 2 steps in 0:00, from the first batch on; held-out loss 3 → 2."
    assert {plot.partition(":")[0] for plot in plots_of(page)} >= {"Loss", "Loss on held-out data"}
    assert not {"Rollouts", "Audit"} & page.sections.keys()
    assert "uv run sft @ FILE" in words(page, "Configuration")
    assert report([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert (run / "report.html").read_text() == to_html(page), "the same run gives the same bytes"


def test_runs_that_have_hardly_begun_or_go_on_have_a_page(copy: RunPaths, tmp_path: Path) -> None:
    """The newest line is half written, the newest batch is damaged."""
    config = RunConfig(output_dir=tmp_path / "fresh")
    write_run(config, config.paths.run_config)
    fresh = build_report(tmp_path / "fresh")
    assert fresh.lead == "0 of 100 steps."
    assert "No step has been measured yet" in to_html(fresh)
    with open(copy.metrics, "a") as file:
        file.write('{"step": 5, "process": "trai')
    batch = copy.journal / "batch_000004.msgpack"
    batch.write_bytes(batch.read_bytes()[:-9])
    run = Run(copy.root)
    assert run.lead().startswith("5 of 5 steps")
    assert any(part.startswith("Batch 4 cannot be read:") for part in run.rollouts(2))


def test_what_cannot_be_written_is_refused(run: Path, tmp_path: Path) -> None:
    for folder, to, said in (
        (run, tmp_path / "r.pdf", r"is written as \.html - expected a name"),
        (run, run / "metrics.jsonl" / "r.html", r"metrics\.jsonl"),
        (tmp_path / "nowhere", tmp_path / "r.html", r"is not a run's folder"),
    ):
        with pytest.raises((ConfigError, OSError), match=said):
            report([str(folder), "--out", str(to), "--no-audit"])
    assert list(tmp_path.iterdir()) == []
