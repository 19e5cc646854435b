"""`docs/metrics.md` and what a run writes are one list."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from parsing import parse
from tiny import open_state, random_samples, train_step
from trireme.monitor.collapse import SIGNS
from trireme.monitor.metrics import read_metrics
from trireme.trainer.mesh import World
from whole_run import build_config, run

REPOSITORY = Path(__file__).parents[2]
DOCUMENT = REPOSITORY / "docs" / "metrics.md"
SOURCES = [REPOSITORY / "src" / "trireme" / room for room in ("algo", "orchestrator", "trainer", "monitor", "base")]

# In this run: what the environment below measures itself is called "odd".
WILD = {"ENV": r"[^/]+", "METRIC": "odd", "REASON": r"\w+", "NAME": r"\w+", "K": r"\d+"}
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


@cache
def documented() -> set[str]:
    """Names of the first column, but for the warnings' own."""
    text = DOCUMENT.read_text().split("## Warnings")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def is_documented(name: str) -> bool:
    patterns = (PLACEHOLDER.sub(lambda found: WILD[found[0]], re.escape(doc)) for doc in documented())
    return any(re.fullmatch(pattern, name) for pattern in patterns)


@pytest.fixture(scope="module")
def orchestrators_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    sections = {
        "eval": {"rollouts_per_example": 2, "sampling": {"temperature": 1.0}},
        "buffer": {"pools": {}, "online_difficulty_filtering": True},
        "curriculum": [{"weights": {"say": 1.0}}],
    }
    config = build_config(tmp_path_factory.mktemp("run"), CODE, max_steps=2, orchestrator=sections)
    outcome = run(config)
    assert outcome.error is None
    return {name for row in read_metrics(config.paths.metrics)[0] for name in row}


def test_every_metric_that_an_orchestrator_writes_is_documented(orchestrators_names):
    ours = orchestrators_names - {"step", "process", "time_s"}
    assert len(ours) > 40
    assert {name for name in ours if not is_documented(name) and not name.startswith("fake/")} == set()


def test_every_metric_of_an_optimizer_step_is_documented(tiny_model: Path, world: World):
    state = open_state(tiny_model, world)
    names = set(train_step(state, random_samples([12, 9]), world))
    assert "loss" in names
    assert {name for name in names if not is_documented(name)} == set()


def test_what_the_guides_say_to_watch_is_written(orchestrators_names: set[str], tiny_model: Path, world: World):
    """`docs/coming-from.md`: those who know other trainers look for these."""
    written = orchestrators_names | set(train_step(open_state(tiny_model, world), random_samples([12, 9]), world))
    watched = {"reward/mean", "reward/std", "policy/entropy", "policy/kl", "importance_ratio", "loss", "grad_norm"}
    assert watched - written == set()


@cache
def words_of_the_source() -> set[str]:
    """Its strings; what an f-string fills in is a star."""
    words = set()
    for file in (file for room in SOURCES for file in room.rglob("*.py")):
        for node in ast.walk(parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                words.add("".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values))
    return words


def test_every_span_that_is_timed_is_documented():
    spans = {
        name
        for file in (REPOSITORY / "src" / "trireme" / "trainer").rglob("*.py")
        for name in re.findall(r"_?timer\.(?:span|add)\(\s*\"(\w+)\"", file.read_text())
    }
    assert "forward_backward" in spans
    assert {span for span in spans if not is_documented(f"time/{span}")} == set()


def forms(name: str) -> set[str]:
    """In which the source may have it: as a whole, or as the last part of a name that is put together."""
    starred = PLACEHOLDER.sub("*", name)
    last = starred.rsplit("/", 1)[-1]
    return {starred, last, last.removesuffix("_frac")}


def test_every_documented_metric_is_one_that_the_source_writes():
    assert len(documented()) > 80
    assert {name for name in documented() if not forms(name) & words_of_the_source()} == set()


def test_every_warning_is_documented_with_its_very_words():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", DOCUMENT.read_text().split("## Warnings")[1], re.M)
    assert [(name, meaning, advice) for name, _, meaning, advice in rows] == [
        (sign.name, sign.meaning, sign.advice) for sign in SIGNS
    ]
    for name, seen, _, _ in rows:
        (sign,) = (sign for sign in SIGNS if sign.name == name)
        assert "error_rate" in seen or {f"`{watched}`" for watched in sign.watched} & set(re.findall(r"`[^`]+`", seen))


def test_every_metric_that_a_warning_watches_is_documented():
    assert {name for sign in SIGNS for name in sign.watched if not is_documented(name)} == set()
