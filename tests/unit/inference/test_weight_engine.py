"""What a worker of vLLM answers when an update breaks: never an exception, which would spoil the answers after it."""

from types import SimpleNamespace
from typing import Any

from trireme.inference.weight_engine import WorkerExtension


class Worker(WorkerExtension):
    """A worker with vLLM's own rules: an update is open until it has finished, or until tensors do not arrive."""

    def __init__(self, breaks_in: str) -> None:
        self.breaks_in, self.is_open = breaks_in, False
        self.weight_transfer_engine: Any = SimpleNamespace(digests={"w": "1"}, incomplete=[], adapter={})

    def start_weight_update(self) -> None:
        if self.is_open:
            raise RuntimeError("an update is open")
        self.is_open = True

    def update_weights(self, info: dict[str, Any]) -> None:
        self.is_open = self.breaks_in != "update"
        self._break("update")

    def finish_weight_update(self) -> None:
        self._break("finish")
        self.is_open = False

    def _break(self, where: str) -> None:
        if self.breaks_in == where:
            self.breaks_in = ""
            raise MemoryError(where)


def test_a_worker_whose_update_broke_says_so_and_takes_the_next():
    for where in ("update", "finish"):
        worker = Worker(where)
        assert worker.trireme_update({})["failure"] == f"MemoryError: {where}"
        assert worker.trireme_update({}) == {"digests": {"w": "1"}, "incomplete": []}
