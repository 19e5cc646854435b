"""`docs/coming-from.md` leaves nothing of the documents out, and what its rows say is so."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import coming_from as page
from coming_from import EIGHT_GPUS, REPOSITORY, Row, rows
from stage import until, write_checkpoint
from trireme.base import devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, step_folder
from trireme.config.aliases import NOT_A_KEY
from trireme.config.elsewhere.flat_file import Flat, Hosted
from trireme.config.elsewhere.vf_rl_file import VfArgs
from trireme.config.gepa import GepaConfig
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules import launch_problems
from trireme.config.run import RunConfig
from trireme.launch.children import open_crew
from trireme.launch.plan import ProcessSpec
from trireme.orchestrator.eval_results import Answer, write_answers

FORMATS = tuple(page.SMALL)
FRESH = {"lab", "env", "vf-setup", "vf-init"}
"""Commands that write a workspace, so begin in an empty folder."""


def shown_by(*kinds: str) -> list[Any]:
    return [pytest.param(row, id=str(row)) for row in rows() if row.means in kinds]


# nothing is left out


@pytest.mark.parametrize("document", page.documents())
def test_every_line_of_a_document_has_a_row(document: str) -> None:
    covered = {number for row in rows() if row.document == document for number in row.lines}
    assert page.content_lines(document) - covered == set()


@pytest.mark.parametrize("document", page.documents())
def test_every_name_of_a_document_is_in_a_row_of_its_line(document: str) -> None:
    missing = [
        (line, name)
        for line, names in page.documents()[document]["names"].items()
        for name in names
        if not any(name in f"{row.there} {row.here}".replace("`", "") for row in at(document, int(line)))
    ]
    assert missing == []


def at(document: str, line: int) -> list[Row]:
    return [row for row in rows() if row.document == document and line in row.lines]


@pytest.mark.parametrize("document", page.documents())
def test_every_toml_block_of_a_document_is_loaded(document: str) -> None:
    unloaded = [
        first for first in page.blocks(document) if not any(row.means in FORMATS for row in at(document, first))
    ]
    assert unloaded == []


def test_every_row_is_well_formed() -> None:
    lines = [line for line in page.PAGE.read_text().splitlines() if re.match(r"\| \d", line)]
    assert len(rows()) == len(lines) > 300
    assert {row.document for row in rows()} == set(page.documents())
    assert [str(row) for row in rows() if not row.here.startswith(page.VERDICTS)] == []
    assert [str(row) for row in rows() if re.search(r"\b(later|todo|planned|not yet|soon)\b", row.here, re.I)] == []


def test_no_row_waits_to_be_shown() -> None:
    known = {*FORMATS, "runs", "refused", "flags", "metrics", "-"}
    assert {row.means for row in rows() if row.means not in known and not row.means.startswith("test_")} == set()


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.PAGE.read_text())
    assert [link for link in links if not (page.PAGE.parent / link).exists()] == []


@pytest.mark.parametrize("name", sorted({*VfArgs.model_fields, *Flat.model_fields, *Hosted.model_fields}))
def test_a_key_of_another_format_is_answered_in_a_file_of_rl(name: str, tmp_path: Path) -> None:
    """It is a key of ours, or the refusal names one, or says what to do."""
    if name in RunConfig.model_fields:
        return
    (tmp_path / "rl.toml").write_text(f'orchestrator.env = {{ id = "x" }}\n{name} = 1\n')
    with pytest.raises(ConfigError) as caught:
        load_run_config(["@", str(tmp_path / "rl.toml")], program="rl")
    assert f"unknown key `{name}`" in str(caught.value)
    assert "Did you mean `" in str(caught.value) or NOT_A_KEY[name] in str(caught.value)


def test_commands_of_the_tutorial_are_typed_with_flags_that_there_are(call: Call) -> None:
    """Its page has what they print."""
    commands = re.findall(r"^\$ uv run (.+)$", page.PAGE.with_name("tutorial.md").read_text(), re.MULTILINE)
    assert len(commands) >= 8
    for words in map(shlex.split, commands):
        code, manual = call([*page.verbs(words), "--help"])
        assert code == 0, manual
        flags = [word for word in words if re.match(r"--?[a-z]", word)]
        assert [flag for flag in flags if not _is_in(flag, manual)] == [], words


# what rows say


@pytest.mark.parametrize("row", shown_by(*FORMATS))
def test_toml_means_what_the_row_says(row: Row, tmp_path: Path) -> None:
    if row.is_refused:
        with pytest.raises(ConfigError) as caught:
            page.load(row, tmp_path)
        assert row.said
        assert [words for words in row.said if words not in str(caught.value)] == [], str(caught.value)
        return
    wanted = page.expected(row.here, GepaConfig if row.means == "gepa" else RunConfig)
    assert wanted, f"{row} says nothing that could be compared"
    config = page.load(row, tmp_path)
    assert {key: page.value_at(config, key) for key in wanted} == wanted


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As after `lab setup` beside a checkout, on a machine with eight GPUs."""
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    _write_split_files(tmp_path / "configs" / "my_exp")
    for folder in ("models", "environments"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write_split_files(folder: Path) -> None:
    """One file per process."""
    folder.mkdir()
    (folder / "train.toml").write_text("max_steps = 5\n[optim]\nlr = 1e-5\n")
    (folder / "orch.toml").write_text('batch_size = 64\n[environment]\nid = "reverse-text"\n')
    (folder / "infer.toml").write_text("gpu_memory_utilization = 0.8\n")


Call = Callable[[list[str]], tuple[int, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Calls a program in this process: its exit code, and all that it wrote."""

    def call(words: list[str]) -> tuple[int, str]:
        door = page.program(words[0])
        _give_gpus(monkeypatch)
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            door()
        written = capsys.readouterr()
        return _exit_code(ended.value.code), written.out + written.err

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setenv("COLUMNS", "200")
    before = signal.getsignal(signal.SIGPIPE)
    yield call
    signal.signal(signal.SIGPIPE, before)


def _give_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_count_gpus", lambda _: EIGHT_GPUS.num_gpus)
    monkeypatch.setattr(devices, "_count_cores", lambda: EIGHT_GPUS.cores)


def _exit_code(code: Any) -> int:
    return code if isinstance(code, int) else int(code is not None)


DRY = ("rl", "vf-rl", "prime-rl", "inference", "trireme submit", "trireme train submit")
"""Commands that would start a run, and have `--dry-run`."""


@pytest.mark.parametrize("row", shown_by("runs"))
def test_the_command_of_the_row_runs(
    row: Row, workspace: Path, call: Call, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(row.command)
    if FRESH & set(words[:2]):
        monkeypatch.chdir(tmp_path_factory.mktemp("fresh"))
    if " ".join(page.verbs(words)) in DRY and not {"--dry-run", "--help"} & set(words):
        words.append("--dry-run")
    if step := re.search(r"resume[-_]step[ =]+(\d+)", row.command):
        _write_run_to_resume(RunPaths(workspace / "outputs" / "reverse-text"), int(step[1]))
    code, written = call(words)
    assert code == 0, written
    assert [said for said in row.said if said not in written] == [], written


def _write_run_to_resume(paths: RunPaths, step: int) -> None:
    write_checkpoint(paths, step)
    paths.metrics.touch()


@pytest.mark.parametrize("row", shown_by("refused"))
def test_the_command_of_the_row_is_refused_in_the_rows_words(row: Row, workspace: Path, call: Call) -> None:
    code, written = call(shlex.split(row.command))
    assert code == 2, written
    assert row.said
    assert [said for said in row.said if said not in written] == [], written


@pytest.mark.parametrize("row", shown_by("flags"))
def test_flags_of_the_row_are_those_of_the_command(
    row: Row, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = [flag for quoted in page.quotes(row.there) + page.quotes(row.here) for flag in _flags(quoted)]
    words = shlex.split(row.command)
    code, manual = call([*page.verbs(words), "--help"])
    assert code == 0, manual
    assert [
        flag for flag in typed if not _is_in(flag, manual) and not _is_in(flag.replace("--no-", "--"), manual)
    ] == []
    _empty(tmp_path, monkeypatch)
    code, written = call(words)
    assert code == 2, written
    assert re.findall("usage:|unknown flag|unrecognized|is no flag", written) == [], written


def _empty(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No files, and no keys with which anybody could be asked."""
    monkeypatch.chdir(folder)
    for name in list(os.environ):
        if name.endswith("_API_KEY"):
            monkeypatch.delenv(name)


def _is_in(flag: str, manual: str) -> bool:
    return bool(re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", manual))


def _flags(quoted: str) -> list[str]:
    if not page.is_command(quoted) and not quoted.startswith(("-", "prime ")):
        return []
    return [word.rstrip(",") for part in quoted.split("/") for word in part.split() if re.match(r"--?[A-Za-z]", word)]


@pytest.mark.parametrize("row", shown_by("metrics"))
def test_metrics_of_the_row_are_written_by_runs(row: Row) -> None:
    known = page.metrics()
    named = [quoted for quoted in page.quotes(row.here) if re.fullmatch(r"\w+(/\w+)*", quoted)]
    assert named
    assert [name for name in named if name not in known] == []


@pytest.mark.parametrize("row", [pytest.param(row, id=str(row)) for row in rows() if row.means.startswith("test_")])
def test_the_test_that_a_row_names_exists(row: Row) -> None:
    file, _, function = row.means.partition("::")
    (path,) = page.tests_named(file)
    assert not function or function in page.functions_of(path)


# tests of their own, which rows name


def test_a_port_in_use_is_refused_with_the_command_that_shows_who_has_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        table = page.merged(page.SMALL["vf-rl"], {"trainer": {"args": {"vllm_server_port": port}}})
        config = resolve(page._translated("vf-rl", table, tmp_path), EIGHT_GPUS)
        found = [problem for problem in launch_problems(config, EIGHT_GPUS) if f"port {port}" in problem]
    assert len(found) == 1
    assert f"`lsof -i :{port}` shows who has it" in found[0]


def test_variables_of_the_shell_reach_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a run, started by what starts all of them."""
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    said = "import os; print(os.environ['NCCL_P2P_DISABLE'])"
    spec = ProcessSpec("trainer", (sys.executable, "-c", said), {}, tmp_path / "log", gpus=(), ports={})
    with open_crew([spec], hurry=lambda: True, grace_s=1) as crew:
        until(lambda: (crew.look(), crew.children[0].exit)[1])
    assert spec.log.read_text().strip() == "1"


def test_a_run_has_its_files_where_the_documents_look_for_them(tmp_path: Path) -> None:
    paths = RunPaths(Path("outputs"))
    assert str(step_folder(paths.weights, 50)) == "outputs/weights/step_50"
    assert str(step_folder(paths.checkpoints, 50)) == "outputs/checkpoints/step_50"
    assert str(paths.log("orchestrator")) == "outputs/logs/orchestrator.stdout"
    assert str(RunConfig(name="x").paths.root) == "outputs/x"


def test_the_table_of_memory_is_what_a_plan_says(call: Call, workspace: Path) -> None:
    """7B with LoRA on 80 GB, as the guide has it; figures as the rows have them."""
    typed = "trireme plan --model.name Qwen/Qwen2.5-7B-Instruct --trainer.model.lora.rank 32 --trainer-gpus 1"
    typed += " --trainer.model.optimization-dtype bfloat16 --inference-gpus 3 --gpu h100 --gpus 4 --json"
    for line, flags in (
        (338, "--seq-len 16384"),
        (339, "--seq-len 16384 --trainer.model.ac.freq 1"),
        (340, "--seq-len 8192 --trainer.model.ac.freq 1"),
    ):
        (row,) = at("prime-rl guide", line)
        code, written = call(shlex.split(f"{typed} {flags}"))
        trainer = json.loads(written)["trainer"]
        assert (code == 1, trainer["fits"]) == ((True, False) if line == 338 else (False, True))
        assert f"{trainer['needs_gib']:.1f} GiB" in row.here


def test_the_script_of_the_guide_reads_our_results(tmp_path: Path) -> None:
    """Its steps: lines, groups by example, deviation of the rewards within each."""
    rewards = {0: [0.0, 1.0], 7: [0.5, 0.5]}
    answers = [
        Answer(example_id=example, reward=reward, example=example, rollout=number)
        for example, found in rewards.items()
        for number, reward in enumerate(found)
    ]
    write_answers(tmp_path / "results.jsonl", answers)
    with open(tmp_path / "results.jsonl") as file:
        rollouts = [json.loads(line) for line in file]
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout["example_id"], []).append(rollout["reward"])
    assert groups == rewards
    assert {example: statistics.pstdev(found) for example, found in groups.items()} == {0: 0.5, 7: 0.0}
