"""A folder with two environments, a base model and the checkpoints of a run."""

from pathlib import Path

import pytest

from support.engines.weighed_engine import write_weights
from support.runs.evaluating import SAY, TOY


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "MY_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "say.py").write_text(SAY)
    (tmp_path / "configs").mkdir()
    write_weights(tmp_path / "base", "a")
    for step, letter in ((10, "b"), (20, "c"), (100, "d")):
        write_weights(tmp_path / "run" / "weights" / f"step_{step}", letter)
    return tmp_path
