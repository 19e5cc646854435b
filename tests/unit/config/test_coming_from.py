"""`docs/coming-from.md` leaves nothing of the documents out, and what its rows say is so."""

import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from model_configs import cache_models
from resolved_runs import value_at
from stage import write_checkpoint
from trireme.base import devices
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, step_folder
from trireme.config.files import to_toml
from trireme.config.load import load_run_config, read_as
from trireme.config.problems import NOTHING
from trireme.config.resolve import resolve
from trireme.config.rules import check
from trireme.config.run import RunConfig
from trireme.config.section import Section
from trireme.tools.formats.flat import FLAT, HOSTED, Flat, Hosted
from trireme.tools.formats.translation import translate
from trireme.tools.formats.vf_rl import VF_RL, VfArgs
from trireme.tools.gepa.config import GepaConfig

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "coming-from.md"
EIGHT_GPUS = Devices(gpus=tuple("01234567"), cores=64)

TITLES = {
    "The tutorial of vf.RLTrainer": "tutorial", "The guide to vf-rl": "vf-rl guide",
    "The reference of RLTrainer": "RLTrainer", "The guide to prime-rl and evaluation": "prime-rl guide",
    "The guide to hosted training, prime-rl and GEPA": "RL guide",
}  # fmt: skip
DOCUMENTS: dict[str, Any] = json.loads((REPOSITORY / "tests" / "data" / "documents.json").read_text())
"""What stands in the documents: see `scripts/names_of_documents.py`."""

PROGRAMS: dict[str, str] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
NESTED = ("init", "install", "list", "check", "run", "tui", "submit", "setup")
FRESH = {"lab", "env", "vf-setup", "vf-init"}  # write a workspace, so begin in an empty folder
DRY = ("rl", "vf-rl", "prime-rl", "inference", "trireme submit", "trireme train submit")  # would start a run

ENV = {"id": "reverse-text"}
TINY = "models/reverse-text-tiny"
SMALL: dict[str, dict[str, Any]] = {
    "rl": {"orchestrator": {"env": [ENV]}}, "rl orchestrator": {},
    "vf-rl": {"model": TINY, "env": ENV, "inference": {"gpus": 1}, "trainer": {"gpus": 1}},
    "prime-rl": {"model_name": TINY, "env": ENV}, "hosted": {"model": TINY, "env": [ENV]},
    "gepa": {"env_id": "reverse-text", "model": TINY},
}  # fmt: skip
"""The smallest file of each format: what a row's TOML is put into."""


class Row(NamedTuple):
    document: str
    lines: range  # of the document
    there: str
    here: str
    shown_by: str

    @property
    def means(self) -> str:
        """The first words of the last column, without `block`."""
        return re.sub(r" (block|refuses)$", "", self.shown_by)

    @property
    def said(self) -> list[str]:
        return [quoted for part in self.here.split("says")[1:] for quoted in quotes(part)]

    @property
    def words(self) -> list[str]:
        place = self.there if self.here.startswith("works as written") else self.here
        found = [quoted for quoted in quotes(place) + quotes(self.here) if is_command(quoted)]
        return shlex.split(found[0].removeprefix("uv run "))


def quotes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def is_command(quoted: str) -> bool:
    return quoted.removeprefix("uv run ").partition(" ")[0] in PROGRAMS


def verbs(words: list[str]) -> list[str]:
    if words[0] != "trireme":
        return words[:1]
    return words[:3] if words[2:3] and words[2] in NESTED else words[:2]


def read_rows() -> Iterator[Row]:
    document = None
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            document = TITLES.get(line.removeprefix("## "))
        found = re.fullmatch(r"\| (\d+)(?:-(\d+))? \| (.+) \| (.+) \| `?(\S.*?)`? \|", line)
        if found and document:
            first, last, there, here, shown_by = found.groups()
            yield Row(document, range(int(first), int(last or first) + 1), there, here, shown_by)


ROWS = list(read_rows())


def at(document: str, line: int) -> list[Row]:
    return [row for row in ROWS if row.document == document and line in row.lines]


def rows(*kinds: str) -> Any:
    found = [row for row in ROWS if row.means in kinds or row.means.partition("_")[0] in kinds]
    return pytest.mark.parametrize("row", found, ids=lambda row: f"{row.document} {row.lines[0]}-{row.lines[-1]}")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_coming_from_guide_covers_every_line_of_a_document(document):
    listed = DOCUMENTS[document]
    for first, _, last in (run.partition("-") for run in listed["content"].split()):
        assert [line for line in range(int(first), int(last or first) + 1) if not at(document, line)] == []
    cells = {line: " ".join(f"{row.there} {row.here}" for row in at(document, int(line))) for line in listed["names"]}
    names = [(line, name) for line, names in listed["names"].items() for name in names]
    assert [(line, name) for line, name in names if name not in cells[line].replace("`", "")] == []
    assert [line for line in listed["toml"] if not any(row.means in SMALL for row in at(document, int(line)))] == []


def test_every_row_is_well_formed():
    text = PAGE.read_text()
    assert len(ROWS) == len(re.findall(r"^\| \d", text, re.MULTILINE)) > 300
    assert {row.document for row in ROWS} == set(DOCUMENTS)
    assert [row for row in ROWS if not row.here.startswith(("works as ", "does not apply because "))] == []
    known = {*SMALL, "runs", "flags", "metrics", "-"}
    assert [row for row in ROWS if row.means not in known and not row.means.startswith("test_")] == []
    assert [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not (PAGE.parent / link).exists()] == []


def test_a_key_of_another_format_is_answered_in_a_file_of_rl(tmp_path):
    theirs = {*VfArgs.model_fields, *Flat.model_fields, *Hosted.model_fields} - RunConfig.model_fields.keys()
    for name in theirs:
        (tmp_path / "rl.toml").write_text(f'orchestrator.env = {{ id = "x" }}\n{name} = 1\n')
        with pytest.raises(ConfigError, match=f"unknown key `{name}`") as caught:
            load_run_config(["@", str(tmp_path / "rl.toml")], program="rl")
        assert NOTHING not in str(caught.value), name


def test_commands_of_the_tutorial_are_typed_with_flags_that_there_are(call):
    commands = re.findall(r"^\$ uv run (.+)$", PAGE.with_name("tutorial.md").read_text(), re.MULTILINE)
    assert len(commands) >= 8
    for words in map(shlex.split, commands):
        code, manual = call([*verbs(words), "--help"])
        assert code == 0, manual
        flags = [word for word in words if re.match(r"--?[a-z]", word)]
        assert [flag for flag in flags if not is_in(flag, manual)] == [], words


@rows(*SMALL)
def test_toml_means_what_the_row_says(row, tmp_path):
    if row.shown_by.endswith(" refuses"):
        with pytest.raises(ConfigError) as caught:
            load(row, tmp_path)
        assert row.said
        assert [words for words in row.said if words not in str(caught.value)] == [], str(caught.value)
    else:
        wanted = expected(row.here, GepaConfig if row.means == "gepa" else RunConfig)
        assert wanted, "the row says nothing that could be compared"
        config = load(row, tmp_path)
        assert {key: value_at(config, key) for key in wanted} == wanted


def load(row: Row, folder: Path) -> Section:
    """Load the row's TOML as its command does, up to what it would start."""
    if row.shown_by.endswith(" block"):
        (typed,) = (block for first, block in DOCUMENTS[row.document]["toml"].items() if int(first) in row.lines)
    else:
        typed = fragment(row.there)
    table = merged(SMALL[row.means], typed)
    if row.means == "gepa":
        return read_as(GepaConfig, table, where="the row")
    format = {"vf-rl": VF_RL, "prime-rl": FLAT, "hosted": HOSTED}.get(row.means)
    file = folder / "row.toml"
    file.write_text(to_toml(translate(format, table, EIGHT_GPUS).table if format else table))
    argv = ["--orchestrator", "@", str(file)] if row.means == "rl orchestrator" else ["@", str(file)]
    config = resolve(load_run_config(argv, program="rl")[0], EIGHT_GPUS)
    check(config, EIGHT_GPUS)
    return config


def fragment(cell: str) -> dict[str, Any]:
    """The quoted lines of TOML after the cell's last colon; `key = none` stays a word of its own."""
    typed = re.split(r": (?=[^`]*(?:`[^`]*`[^`]*)*$)", cell)[-1]
    lines = [quoted for quoted in quotes(typed) if re.fullmatch(r"\[+[\w.]+\]+|[\w.]+ = \S.*", quoted)]
    text = "\n".join(re.sub(r"= none$", '= "none"', line) for line in lines)
    return tomllib.loads(text)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """A key that is "none" at the top of a row's TOML is taken away."""
    both = {
        key: merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return {key: value for key, value in (below | both).items() if value != "none" or key not in below}


def expected(cell: str, root: type[Section]) -> dict[str, Any]:
    pairs = [quoted.partition(" = ") for quoted in quotes(cell) if re.fullmatch(r"[a-z][\w.]* = .+", quoted)]
    ours = [(key, value) for key, _, value in pairs if key.split(".")[0] in root.model_fields]
    return {key: None if value == "none" else tomllib.loads(f"x = {value}")["x"] for key, value in ours}


@pytest.fixture
def workspace(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As after `lab setup` beside a checkout, on a machine with eight GPUs."""
    cache_models(tmp_path_factory.mktemp("hub"), monkeypatch)
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    (split := tmp_path / "configs" / "my_exp").mkdir()  # one file per process
    (split / "train.toml").write_text("max_steps = 5\n[optim]\nlr = 1e-5\n")
    (split / "orch.toml").write_text('batch_size = 64\n[environment]\nid = "reverse-text"\n')
    (split / "infer.toml").write_text("gpu_memory_utilization = 0.8\n")
    for folder in ("models", "environments"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], tuple[int, str]]:
    """Calls a program in this process: its exit code, and all that it wrote."""

    def call(words: list[str]) -> tuple[int, str]:
        module, _, function = PROGRAMS[words[0]].partition(":")
        main: Callable[[], None] = getattr(import_module(module), function)
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        code, written = ended.value.code, "".join(capsys.readouterr())
        return code if isinstance(code, int) else int(code is not None), written

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_count_gpus", lambda _: EIGHT_GPUS.num_gpus)
    monkeypatch.setattr(devices, "_count_cores", lambda: EIGHT_GPUS.cores)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setenv("COLUMNS", "200")
    return call


@rows("runs")
def test_the_command_of_the_row_runs(row, workspace, call, tmp_path_factory, monkeypatch):
    words = row.words
    if FRESH & set(words[:2]):
        monkeypatch.chdir(tmp_path_factory.mktemp("fresh"))
    if " ".join(verbs(words)) in DRY and not {"--dry-run", "--help"} & set(words):
        words.append("--dry-run")
    if step := re.search(r"resume[-_]step[ =]+(\d+)", " ".join(words)):
        paths = RunPaths(workspace / "outputs" / "reverse-text")
        write_checkpoint(paths, int(step[1]))
        paths.metrics.touch()
    code, written = call(words)
    assert code == 0, written
    assert [said for said in row.said if said not in written] == [], written


@rows("flags")
def test_flags_of_the_row_are_those_of_the_command(row, call, here, monkeypatch):
    typed = [flag for quoted in quotes(row.there) + quotes(row.here) for flag in flags_in(quoted)]
    code, manual = call([*verbs(row.words), "--help"])
    assert code == 0, manual
    assert [flag for flag in typed if not any(is_in(f, manual) for f in (flag, flag.replace("--no-", "--")))] == []
    for name in [name for name in os.environ if name.endswith("_API_KEY")]:
        monkeypatch.delenv(name)  # an endpoint could be asked
    code, written = call(row.words)
    assert (code, re.findall("usage:|unknown flag|unrecognized|is no flag", written)) == (2, []), written


def is_in(flag: str, manual: str) -> bool:
    return bool(re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", manual))


def flags_in(quoted: str) -> list[str]:
    words = quoted.replace("/", " ").split() if is_command(quoted) or quoted.startswith(("-", "prime ")) else []
    return [word.rstrip(",") for word in words if re.match(r"--?[A-Za-z]", word)]


@rows("metrics")
def test_metrics_of_the_row_are_written_by_runs(row):
    cells = re.findall(r"^\| (`[^|]*`) \|", (REPOSITORY / "docs" / "metrics.md").read_text(), re.MULTILINE)
    named = {quoted for quoted in quotes(row.here) if re.fullmatch(r"\w+(/\w+)*", quoted)}
    assert named
    assert named - {name for cell in cells for name in quotes(cell)} == set()


@rows("test")
def test_the_test_that_a_row_names_exists(row):
    name, _, function = row.means.partition("::")
    (file,) = (path for path in (REPOSITORY / "tests").rglob(name))
    assert not function or re.search(rf"^(async )?def {function}\(", file.read_text(), re.MULTILINE)


def test_a_run_has_its_files_where_the_documents_look_for_them():
    paths = RunPaths(Path("outputs"))
    assert str(step_folder(paths.weights, 50)) == "outputs/weights/step_50"
    assert str(step_folder(paths.checkpoints, 50)) == "outputs/checkpoints/step_50"
    assert str(paths.log("orchestrator")) == "outputs/logs/orchestrator.stdout"
    assert str(RunConfig(name="x").paths.root) == "outputs/x"


def test_the_table_of_memory_is_what_a_plan_says(call, workspace):
    typed = "trireme plan --model.name Qwen/Qwen2.5-7B-Instruct --trainer.model.lora.rank 32 --trainer-gpus 1"
    typed += " --trainer.model.optimization-dtype bfloat16 --inference-gpus 3 --gpu h100 --gpus 4"
    freq = " --trainer.model.ac.freq 1"
    for line, flags in ((338, "--seq-len 16384"), (339, f"--seq-len 16384{freq}"), (340, f"--seq-len 8192{freq}")):
        (row,) = at("prime-rl guide", line)
        code, written = call(shlex.split(f"{typed} {flags}"))
        assert code == (1 if line == 338 else 0)
        trainer, _ = re.findall(r"([\d.]+) / 79\.00 │", written)  # of the trainer and of an engine
        assert f"{float(trainer):.1f} GiB" in row.here
