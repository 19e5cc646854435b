"""Our end of the weight path inside vLLM: receives tensors, fingerprints and loads them, and reports what it did.

One engine for all kinds (gloo, nccl, ipc, filesystem): a kind only decides the source of the tensors. vLLM's own
`nccl` and `ipc` engines would do for the transport, but confirm nothing and need vLLM inside the trainer.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import wraps
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from trireme.algo.digest import tensor_digest
from trireme.algo.weight_checks import is_of_adapter
from trireme.base.background import in_background
from trireme.base.faults import fault, reach
from trireme.inference.vllm_api import (
    adapter_gaps,
    begin_reload,
    finish_reload,
    incomplete_layers,
    load_adapter,
    load_tensors,
)
from trireme.messages import InitInfo, TensorSpec, UpdateInfo
from trireme.transport.weights.backends import open_receiver
from trireme.transport.weights.buckets import split_into_buckets
from trireme.transport.weights.transfer import Receiver, take_transfer

Arrived = tuple[str, torch.Tensor, str]  # name, a copy of the tensor, and its digest

LOADED_BYTES = 16 << 20
"""Bytes of tensors that are loaded in one call: the memory of a transfer besides its buckets, or one larger tensor."""


class TriremeWeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Registered in vLLM as `--weight-transfer-config '{"backend": "trireme"}'`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _info: InitInfo  # settings with which the receiver was opened

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receiver: Receiver | None = None
        self.digests: dict[str, str] = {}
        self.incomplete: list[str] = []
        self.adapter: dict[str, torch.Tensor] = {}
        self._is_reloading = False
        self._background: Future[list[Arrived]] | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        return msgspec.convert(init_dict, InitInfo)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        return msgspec.convert(update_dict, UpdateInfo)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._background = None
        if self._receiver is None or init_info != self._info:
            self.shutdown()
            self._receiver, self._info = open_receiver(init_info, self.device), init_info
        self._receiver.join(init_info.epoch, init_info.rank_offset + self._place, init_info.world_size)
        reach("engine.joined")

    @property
    def _place(self) -> int:
        """Number of this worker among those of all cores of the engine, counted from 0."""
        parallel = self.parallel_config
        return parallel.data_parallel_index * parallel.world_size + parallel.rank

    def receive_ahead(self, specs: list[TensorSpec]) -> bool:
        """Receive the next transfer in the background while requests are served; `receive_weights` then only loads it.

        Returns False and starts nothing if that takes more memory than a bucket, or on a GPU, as a broadcast that
        waits for its sender would block the device.
        """
        assert self._receiver is not None, "receive_ahead before init_weight_transfer_engine"
        if self.device.type != "cpu" or len(split_into_buckets(specs, self._info.bucket_bytes)) > 1:
            return False
        coming = _arriving(self._receiver.tensors(specs, {}))
        self._background = in_background(lambda: list(coming), name="weights")
        return True

    def start_weight_update(self) -> None:
        self.incomplete = []
        self._is_reloading = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        assert self._receiver is not None, "update_weights before init_weight_transfer_engine"
        specs = update_info.specs

        # A transfer that was received ahead is only loaded. Otherwise tensors are loaded as they arrive.
        background, self._background = self._background, None
        arrived: Iterable[Arrived]
        if background is not None:
            arrived = take_transfer(background, self._info.timeout_s)  # raises before the model is changed
        else:
            arrived = _arriving(self._receiver.tensors(specs, update_info.payload))

        # Forget the digests of what is replaced: a report must only name weights of this transfer.
        self.adapter = {}
        self.digests = {name: digest for name, digest in self.digests.items() if not is_of_adapter(name)}
        if not all(is_of_adapter(spec.name) for spec in specs):  # adapters alone leave the base model as it is
            self.digests = {}
            self._is_reloading = True
            begin_reload(self.model)

        # Load in portions: one call per tensor is slow, and all at once would double the memory.
        waiting: list[tuple[str, torch.Tensor]] = []
        described, num_bytes = (self.model_config.hf_config, self.model_config.hf_text_config), 0
        tied = any(getattr(config, "tie_word_embeddings", False) for config in described)

        for name, own, digest in arrived:
            self.digests[name] = digest

            # Faults let tests show that a wrong or a missing tensor is noticed.
            if name == fault(f"corrupt_tensor.rank{self._place}"):
                own.mul_(2)

            if is_of_adapter(name):
                self.adapter[name] = own
            elif name not in (fault("skip_tensor"), fault(f"skip_tensor.rank{self._place}")):
                waiting.append((name, own))
                num_bytes += own.nbytes
                if num_bytes >= LOADED_BYTES:
                    load_tensors(self.model, waiting, tied=tied)
                    waiting, num_bytes = [], 0

        load_tensors(self.model, waiting, tied=tied)
        reach("engine.received")

    def finish_weight_update(self) -> None:
        if self._is_reloading:
            self.incomplete = incomplete_layers(self.model)
            finish_reload(self.model, self.model_config)
            self._is_reloading = False
        reach("engine.finished")

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def _arriving(coming: Iterator[tuple[str, torch.Tensor]]) -> Iterator[Arrived]:
    for number, (name, tensor) in enumerate(coming):
        # vLLM keeps tensors until a layer is complete, so it must not get views into a bucket that is reused.
        yield name, tensor.clone(), tensor_digest(tensor)
        if number == 0:
            reach("engine.receiving")


def _without_raising(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Have a method of a worker return what broke it, as `failure`.

    If one of the workers of a core raises, vLLM does not read the answers of those after it, and takes each of them for
    the answer to the next call.
    """

    @wraps(method)
    def call(*args: Any) -> dict[str, Any]:
        try:
            return method(*args)
        except Exception as error:
            traceback.print_exc()
            return {"failure": f"{type(error).__name__}: {error}", "ahead": False, "digests": {}, "incomplete": []}

    return call


class WorkerExtension:
    """Methods that vLLM adds to its workers (`--worker-extension-cls`), called through `/collective_rpc`."""

    model_runner: Any
    weight_transfer_engine: TriremeWeightEngine

    @_without_raising
    def trireme_join(self, info: dict[str, Any]) -> dict[str, Any]:
        """Join a transfer."""
        self.init_weight_transfer_engine(info)  # type: ignore[attr-defined]
        return {}

    @_without_raising
    def trireme_receive_ahead(self, specs: list[dict[str, Any]]) -> dict[str, Any]:
        """Start to receive in the background if possible; return whether it did. Called before anything is sent."""
        return {"ahead": self.weight_transfer_engine.receive_ahead(msgspec.convert(specs, list[TensorSpec]))}

    @_without_raising
    def trireme_update(self, info: dict[str, Any]) -> dict[str, Any]:
        """Load a transfer, as it arrives or as it was received ahead, and report. Called while the engine is paused."""
        vllm: Any = self
        try:
            vllm.start_weight_update()
        except RuntimeError:  # the last update is open still, as its end has failed: vLLM begins none meanwhile
            vllm.finish_weight_update()
            vllm.start_weight_update()
        vllm.update_weights(info)
        vllm.finish_weight_update()

        adapter = self.weight_transfer_engine.adapter
        if adapter and fault("skip_adapter") is None:  # vLLM has dropped the one before
            load_adapter(self.model_runner.lora_manager, adapter)
        return self.trireme_weight_report()

    @_without_raising
    def trireme_weight_report(self) -> dict[str, Any]:
        """Return the digest of each received tensor, and the layers that do not hold what was received."""
        engine, gaps = self.weight_transfer_engine, list[str]()
        if any(is_of_adapter(name) for name in engine.digests):
            adapter = {name: engine.adapter.get(name) for name in engine.digests if is_of_adapter(name)}
            gaps = adapter_gaps(self.model_runner.lora_manager, adapter)
        return {"digests": engine.digests, "incomplete": engine.incomplete + gaps}
