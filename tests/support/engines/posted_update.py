"""One weight update after the other, by hand: what a run's orchestrator asks of an engine, with files for tensors."""

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from safetensors.numpy import save_file

from trireme.messages import InitInfo, TensorSpec, UpdateInfo

Post = Callable[..., Any]
"""Of a route, with the body as keywords; its answer."""

TRIES = 20


@contextmanager
def updated_by_hand(port: int, *, epoch: str = "test") -> Iterator[Post]:
    """The engine at this port, paused, and ready for `update`; resumed at the end."""
    with httpx.Client(base_url=address(port), timeout=60, trust_env=False) as client:

        def post(path: str, **body: Any) -> Any:
            response = client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json() if response.headers.get("content-type") == "application/json" else response.text

        post("pause?mode=keep")
        info = InitInfo("filesystem", "", 0, epoch, rank_offset=1, world_size=2, bucket_bytes=1 << 20, timeout_s=60.0)
        post("init_weight_transfer_engine", init_info=msgspec.to_builtins(info))
        yield post
        post("resume")


def sample_through_update(post: Post, port: int, load: Callable[[bool], object], **body: Any) -> dict[str, Any]:
    """Ask for tokens, update the weights meanwhile, and return what both versions have sampled.

    On a busy machine the engine may be done before the update: then all is done again.

    Args:
        load: loads the weights before the update (False), and those after it.
    """
    begun = re.compile(r"^vllm:num_requests_running\{.*\} 1\.0$", re.MULTILINE)
    for _ in range(TRIES):
        load(False)
        post("resume")
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(post, "inference/v1/generate", **body)
            while not asked.done() and not begun.search(httpx.get(f"{address(port)}/metrics", trust_env=False).text):
                pass
            post("pause?mode=keep")
            load(True)
            post("resume")
            answer = asked.result()
        post("pause?mode=keep")
        if len(answer["choices"][0]["weight_versions"]) > 1:
            return answer
    raise AssertionError(f"the engine was {TRIES} times done before its update")


def address(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def update(post: Post, tensors: Mapping, folder: Path, *, version: int = 0) -> list[str]:
    """Sends these tensors; returns the layers that the engine reports as incomplete."""
    save_file(dict(tensors), folder / "00000.safetensors")
    specs = [TensorSpec(name, "float32", list(tensor.shape)) for name, tensor in tensors.items()]
    info = msgspec.to_builtins(UpdateInfo(specs, {"folder": str(folder)}))
    (report,) = post("collective_rpc", method="trireme_update", args=[info])["results"]
    assert "failure" not in report, report
    post("update_weight_version", new_version=str(version))
    assert tensors.keys() <= report["digests"].keys()
    return [layer.partition(" (")[0] for layer in report["incomplete"]]
