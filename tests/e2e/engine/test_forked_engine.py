"""vLLM on a CPU as we start it: one import, one fork, and the server ends with the engine that it forked."""

import signal

import httpx
import pytest

from support.runs.real_run import SharedEngine, open_engine


def said(engine: SharedEngine) -> tuple[list[int], list[float]]:
    """Tokens and their logprobs, with threads of OpenMP at work where there are several cores."""
    body = {"token_ids": [*range(5, 25)], "sampling_params": {"max_tokens": 12, "temperature": 0.0, "logprobs": 0}}
    url = f"http://127.0.0.1:{engine.port}/inference/v1/generate"
    (choice,) = httpx.post(url, json=body, timeout=60, trust_env=False).json()["choices"]
    return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


@pytest.mark.slow  # its fork serves every test of the quick tier that asks vLLM
def test_vllm_server_ends_when_its_engine_core_is_terminated(tmp_path):
    """The server that is killed, and takes its engine along, is one of the kills of `test_kill_matrix`."""
    with open_engine(tmp_path, forked=False) as opened:
        assert said(opened) == said(opened)
        opened.process.poll()
        alive = [process for process in opened.process.family if process.is_running()]
        core = next(process for process in alive if "EngineCore" in " ".join(process.cmdline()))
        assert not core.children()  # the worker is a part of it
        held = {connection.laddr.port for connection in core.net_connections("tcp") if connection.status == "LISTEN"}
        assert opened.port not in held
        core.send_signal(signal.SIGTERM)
        opened.process.wait()
        assert "engine core exited unexpectedly" in opened.process.output
        assert "shutdown triggered" not in opened.process.output  # as it says of a signal that reached it
