"""`docs/coming-from.md` and the reference of keys have all that the documents name, and what its rows say is so."""

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

from support.models.model_configs import cache_models
from support.processes.stage import write_checkpoint
from support.runs.resolved_runs import value_at
from trireme.base import devices
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, step_folder
from trireme.config.files import to_toml
from trireme.config.load import load_run_config, read_as
from trireme.config.orchestrator import Evaluation
from trireme.config.problems import NOTHING
from trireme.config.resolve import resolve
from trireme.config.rules.check import check
from trireme.config.run import RunConfig
from trireme.config.section import Section, find
from trireme.tools.formats.flat import FLAT, HOSTED
from trireme.tools.formats.translation import translate
from trireme.tools.formats.vf_rl import VF_RL
from trireme.tools.gepa.config import GepaConfig

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "coming-from.md"
EIGHT_GPUS = Devices(gpus=tuple("01234567"), cores=64)

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
    kind: str  # the comment above the row's table: how the row is checked
    there: str
    here: str
    default: str  # the third column

    @property
    def said(self) -> list[str]:
        places = f"{self.here} {self.default}".split("says")[1:]
        return [quoted for place in places for quoted in quotes(place)[:1]]

    @property
    def commands(self) -> list[list[str]]:
        return [shlex.split(quoted.removeprefix("uv run ")) for quoted in quotes(self.here) if is_command(quoted)]


def quotes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def is_command(quoted: str) -> bool:
    return quoted.removeprefix("uv run ").partition(" ")[0] in PROGRAMS


def verbs(words: list[str]) -> list[str]:
    if words[0] != "trireme":
        return words[:1]
    return words[:3] if words[2:3] and words[2] in NESTED else words[:2]


def read_rows() -> Iterator[Row]:
    """Yield the rows of each table that begins below a comment; the first two lines of a table are its head."""
    for kind, table in re.findall(r"^<!-- (.+) -->\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE):
        for line in table.splitlines()[2:]:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            yield Row(kind, cells[0], cells[1], cells[2] if len(cells) > 2 else "")


ROWS = list(read_rows())


def rows(*kinds: str) -> Any:
    found = [row for row in ROWS if row.kind in kinds]
    return pytest.mark.parametrize("row", found, ids=lambda row: f"{row.kind} {row.there[:40]}")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_name_of_a_document_is_in_the_page_or_the_reference(document):
    pages = [PAGE, *sorted((PAGE.parent / "configuration").glob("*.md"))]
    text = re.sub(r"[`\[\]]", "", "".join(page.read_text() for page in pages))
    names = {re.sub(r"[`\[\]]", "", name) for found in DOCUMENTS[document]["names"].values() for name in found}
    keys = {re.split(r" ?= ?", name)[0] for name in names}
    ways = {key: (key, " ".join(key.rsplit(".", 1))) for key in keys}  # a key, or its table and its name
    assert [key for key in keys if not any(re.search(rf"(?<!\w){re.escape(w)}(?!\w)", text) for w in ways[key])] == []


def test_page_has_tables_of_each_kind():
    assert {row.kind for row in ROWS} == {*SMALL, "runs", "flags", "metrics", "trouble", "memory", "defaults"}


def test_a_key_of_another_format_is_answered_in_a_file_of_rl(tmp_path):
    rows = [row for format in (VF_RL, FLAT, HOSTED) for row in format.rows]
    theirs = {row.theirs.removeprefix("trainer.args.") for row in rows if not row.theirs.startswith("inference.")}
    theirs = {name.partition(".")[0] for name in theirs} - RunConfig.model_fields.keys()
    for name in theirs:
        (tmp_path / "rl.toml").write_text(f'orchestrator.env = {{ id = "x" }}\n{name} = "x"\n')
        with pytest.raises(ConfigError, match=f"`{name}(`| = )") as caught:
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


@rows("defaults")
def test_default_is_what_the_row_says(row):
    (key,), (ours,) = quotes(row.there), quotes(row.default)
    field = find(RunConfig, tuple(key.split(".")))
    default = Evaluation().sampling.temperature if key.startswith("orchestrator.eval.sampling") else field.default
    assert repr(default).replace("'", '"') == ours


@rows(*SMALL)
def test_toml_means_what_the_row_says(row, tmp_path):
    if "rror says" in row.here:
        with pytest.raises(ConfigError) as caught:
            load(row.kind, fragment(row), tmp_path)
        assert row.said
        assert [words for words in row.said if words not in str(caught.value)] == [], str(caught.value)
    else:
        wanted = expected(row.here, GepaConfig if row.kind == "gepa" else RunConfig)
        assert wanted, "the row says nothing that could be compared"
        config = load(row.kind, fragment(row), tmp_path)
        assert {key: value_at(config, key) for key in wanted} == wanted


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind in SMALL and row.default.startswith("`")])
def test_default_of_a_row_is_that_of_the_smallest_file(row, tmp_path):
    key = next(iter(expected(row.here, RunConfig)))
    default = quotes(row.default)[0].replace("False", "false")  # as Python writes it in the documents
    wanted = None if default == "None" else tomllib.loads(f"x = {default}")["x"]
    assert value_at(load(row.kind, {}, tmp_path), key) == wanted


@pytest.mark.parametrize(("document", "first"), [(doc, line) for doc in DOCUMENTS for line in DOCUMENTS[doc]["toml"]])
def test_each_file_of_the_documents_loads(document, first, tmp_path):
    block = DOCUMENTS[document]["toml"][first]
    kind = kind_of(document, block)
    if not any("rror says" in row.here and row.kind == kind and fragment(row) == block for row in ROWS):
        load(kind, block, tmp_path)


def kind_of(document: str, block: dict[str, Any]) -> str:
    """Return the format of a file of the documents."""
    for key, kind in {"environment": "rl orchestrator", "env_id": "gepa", "learning_rate": "prime-rl"}.items():
        if key in block:
            return kind
    return {"prime-rl guide": "rl", "RL guide": "hosted"}.get(document, "vf-rl")


def load(kind: str, typed: dict[str, Any], folder: Path) -> Section:
    """Load TOML of a format as its command does, up to what it would start."""
    table = merged(SMALL[kind], typed)
    if kind == "gepa":
        return read_as(GepaConfig, table, where="the row")
    format = {"vf-rl": VF_RL, "prime-rl": FLAT, "hosted": HOSTED}.get(kind)
    file = folder / "row.toml"
    file.write_text(to_toml(translate(format, table, EIGHT_GPUS).table if format else table))
    argv = ["--orchestrator", "@", str(file)] if kind == "rl orchestrator" else ["@", str(file)]
    config = resolve(load_run_config(argv, program="rl")[0], EIGHT_GPUS)
    check(config, EIGHT_GPUS)
    return config


def fragment(row: Row) -> dict[str, Any]:
    """Read the first column as TOML: a key of `vf-rl` stands in `[trainer.args]` unless the row says more."""
    lines = [quoted for quoted in quotes(row.there) if re.fullmatch(r"\[+[\w.]+\]+|[\w.]+ = \S.*", quoted)]
    if row.kind == "vf-rl" and not lines[0].startswith("[") and lines[0].partition(" ")[0] not in SMALL["vf-rl"]:
        lines.insert(0, "[trainer.args]")
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
def test_the_commands_of_the_row_run(row, workspace, call, tmp_path_factory, monkeypatch):
    assert row.commands
    for words in row.commands:
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
    for name in [name for name in os.environ if name.endswith("_API_KEY")]:
        monkeypatch.delenv(name)  # an endpoint could be asked
    assert row.commands
    for words in row.commands:
        code, manual = call([*verbs(words), "--help"])
        assert code == 0, manual
        ways = {flag: (flag, flag.replace("--no-", "--")) for flag in typed}
        assert [flag for flag in typed if not any(is_in(way, manual) for way in ways[flag])] == []

        code, written = call(words)
        assert (code, re.findall("usage:|unknown flag|unrecognized|is no flag", written)) == (2, []), written


@rows("gepa")
def test_flags_of_gepa_are_those_of_the_row(row, call):
    code, manual = call(["trireme", "gepa", "run", "--help"])
    assert code == 0, manual
    assert [flag for flag in quotes(row.there) if not is_in(flag, manual)] == []


def is_in(flag: str, manual: str) -> bool:
    return bool(re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", manual))


def flags_in(quoted: str) -> list[str]:
    words = quoted.split() if quoted.startswith(("uv run ", "trireme ", "prime ")) else []
    return [word for word in words if re.match(r"--?[A-Za-z]", word)]


@rows("metrics", "trouble")
def test_metrics_of_the_row_are_written_by_runs(row):
    cells = re.findall(r"^\| (`[^|]*`) \|", (REPOSITORY / "docs" / "metrics.md").read_text(), re.MULTILINE)
    named = {quoted for quoted in quotes(row.here) if re.fullmatch(r"\w+(/\w+)*", quoted)}
    assert named or row.kind == "trouble"
    assert named - {name for cell in cells for name in quotes(cell)} == set()


def test_a_run_has_its_files_where_the_documents_look_for_them():
    paths = RunPaths(Path("outputs"))
    assert str(step_folder(paths.weights, 50)) == "outputs/weights/step_50"
    assert str(step_folder(paths.checkpoints, 50)) == "outputs/checkpoints/step_50"
    assert str(paths.log("orchestrator")) == "outputs/logs/orchestrator.stdout"
    assert str(RunConfig(name="x").paths.root) == "outputs/x"


@rows("memory")
def test_memory_of_the_row_is_what_a_plan_says(row, call, workspace):
    typed = "trireme plan --model.name Qwen/Qwen2.5-7B-Instruct --trainer.model.lora.rank 32 --trainer-gpus 1"
    typed += " --trainer.model.optimization-dtype bfloat16 --inference-gpus 3 --gpu h100 --gpus 4"
    code, written = call(shlex.split(f"{typed} {quotes(row.there)[0]}"))
    assert code == (1 if "not fit" in row.here else 0)
    trainer, _ = re.findall(r"([\d.]+) / 79\.00 │", written)  # of the trainer and of an engine
    assert f"{float(trainer):.1f} GiB" in row.default
