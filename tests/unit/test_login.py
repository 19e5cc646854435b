"""`trireme login` stores nothing, asks nothing, and tells where keys go without telling what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from trireme.cli.login import login, services

SECRET = "sk-the-secret-itself"


def test_keys_that_are_set_are_named_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "TRIREME_TOKEN")
    lines = services(dict.fromkeys(names, SECRET), tmp_path)
    assert SECRET not in "\n".join(lines)
    for name in names:
        assert any(name in line and "set" in line.split(name)[-1] for line in lines), name


def test_without_any_it_says_where_they_would_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "TRIREME_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert login([]) == 0
    written = capsys.readouterr().out
    assert "nothing to log in to" in written
    assert "`hf auth login`" in written
    assert "`wandb login`" in written
    assert "`trireme lab setup` writes one" in written
    assert list(tmp_path.iterdir()) == []


def test_logins_of_other_tools_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / ".cache" / "huggingface" / "token").write_text(SECRET)
    hub, wandb, *_ = services({}, tmp_path)
    assert "huggingface/token is there" in hub
    assert "not set" in wandb


def test_endpoints_whose_key_is_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOME_KEY", raising=False)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "endpoints.py").write_text(
        "import os\nENDPOINTS = {'default': {'base_url': 'https://a.example/v1', 'api_key': os.getenv('SOME_KEY')}}\n"
    )
    (line,) = (line for line in services({}, tmp_path) if "an endpoint" in line)
    assert "configs/endpoints.py: 1 entries; not set: SOME_KEY" in line
    (tmp_path / "configs" / "endpoints.py").write_text("ENDPOINTS = 3\n")
    (line,) = (line for line in services({}, tmp_path) if "an endpoint" in line)
    assert "cannot be used" in line


def test_a_word_after_it_is_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        login(["--plain"])
    assert ended.value.code == 2
