"""`trireme login` stores nothing, asks nothing, and tells where keys go without telling what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from trireme.cli.login import services

SECRET = "sk-the-secret-itself"
NAMES = ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "TRIREME_TOKEN")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*NAMES, "SOME_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_keys_that_are_set_are_named_and_never_shown(tmp_path):
    lines = services(dict.fromkeys(NAMES, SECRET), tmp_path)
    assert SECRET not in "\n".join(lines)
    assert [name for name in NAMES if not any(name in line and "set" in line.split(name)[-1] for line in lines)] == []


def test_logins_of_other_tools_count_and_endpoints_whose_key_is_missing_are_named(tmp_path):
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / ".cache" / "huggingface" / "token").write_text(SECRET)
    endpoints = tmp_path / "configs" / "endpoints.py"
    endpoints.parent.mkdir()
    endpoints.write_text(
        "import os\nENDPOINTS = {'default': {'base_url': 'https://a.example/v1', 'api_key': os.getenv('SOME_KEY')}}\n"
    )
    lines = services({}, tmp_path)
    assert "huggingface/token is there" in lines[0]
    assert "not set" in lines[1]
    assert any("configs/endpoints.py: 1 entries; not set: SOME_KEY" in line for line in lines)
