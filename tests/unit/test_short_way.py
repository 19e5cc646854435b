"""When requests take the short way to vLLM's engine, and when its own route has something to do on the way."""

from __future__ import annotations

from typing import Any

import pytest

from trireme.config.run import RunConfig
from trireme.inference import server
from trireme.inference.server import server_arguments

SHORT_WAY = "trireme.inference.generate.Generate"


def arguments(**given: Any) -> list[str]:
    return server_arguments(RunConfig.model_validate({"inference": {"args": given}}))


def test_requests_take_the_short_way() -> None:
    flags = arguments()
    assert flags[flags.index(SHORT_WAY) - 1] == "--middleware"


@pytest.mark.parametrize("name", ["api_key", "enable_log_requests", "enable_log_outputs", "otlp_traces_endpoint"])
def test_what_vllm_does_on_its_own_way_is_done(name: str) -> None:
    assert SHORT_WAY not in arguments(**{name: "given"})


def test_a_key_in_the_environment_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "given")
    assert SHORT_WAY not in arguments()


@pytest.mark.parametrize(("installed", "is_known"), [("0.32.0", True), ("0.26.0", False), ("0.33.1", False)])
def test_another_vllm_is_asked_on_its_own_way(monkeypatch: pytest.MonkeyPatch, installed: str, is_known: bool) -> None:
    monkeypatch.setattr(server, "version", lambda name: installed)
    assert (SHORT_WAY in arguments()) is is_known
