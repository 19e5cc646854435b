"""The models of hubs, and a file, for tests of plans."""

from pathlib import Path

import pytest

from support.models.model_configs import cache_models


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_models(tmp_path / "hub", monkeypatch)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text('seq_len = 16384\n[[orchestrator.env]]\nid = "reverse-text"\n')
    return file
