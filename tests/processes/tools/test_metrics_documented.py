"""`docs/metrics.md` and what a run writes are one list."""

import ast
import re
from functools import cache
from pathlib import Path

from parsing import parse
from tiny import open_state, random_samples, train_step
from trireme.monitor.collapse import SIGNS
from trireme.monitor.metrics import read_metrics
from whole_run import build_config, run

REPOSITORY = Path(__file__).parents[3]
DOCUMENT = REPOSITORY / "docs" / "metrics.md"
ROOMS = ("algo", "orchestrator", "trainer", "monitor", "base", "launch")
SOURCES = [REPOSITORY / "src" / "trireme" / room for room in ROOMS]

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


@cache
def documented() -> set[str]:
    """Names of the first column, but for the warnings' own."""
    text = DOCUMENT.read_text().split("## Warnings")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def is_documented(name: str) -> bool:
    patterns = (PLACEHOLDER.sub(lambda found: WILD[found[0]], re.escape(doc)) for doc in documented())
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
    for file in (file for room in SOURCES for file in room.rglob("*.py")):
        for node in ast.walk(parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                words.add("".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values))
    return words


def test_every_documented_metric_is_one_that_the_source_writes():
    assert len(documented()) > 80
    words = words_of_the_source()
    for name in documented():
        starred = PLACEHOLDER.sub("*", name)
        last = starred.rsplit("/", 1)[-1]  # of a name that is put together
        assert words & {starred, last, last.removesuffix("_frac")}, name
