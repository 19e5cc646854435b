"""Sends the trainer's weights to the engines, and does not rest until they have confirmed them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from trireme.algo.digest import tensor_digest
from trireme.algo.logprobs import token_logprobs
from trireme.base.log import get_logger
from trireme.config.run import RunConfig
from trireme.messages import Go, MicroBatch, PolicyReady, PolicySent, Probe, TensorSpec, build_tokens
from trireme.trainer.mesh import World
from trireme.trainer.model import full_tensors, logits_at
from trireme.transport.control import ControlClient
from trireme.transport.weights.buckets import spec_of
from trireme.transport.weights.kinds import Sender, open_sender

log = get_logger("publish")

PROBE_TOKENS = 32
ATTEMPTS = 3


class Publisher:
    """One per rank. Rank 0 talks and sends; the others join in gathering shards."""

    def __init__(self, config: RunConfig, model: PreTrainedModel, world: World, control: ControlClient | None) -> None:
        self._config = config
        self._model = model
        self._world = world
        self._control = control
        self._dtype = getattr(torch, served_dtype(config))
        self._incarnation = uuid.uuid4().hex
        self._specs = [_served_spec(name, parameter, self._dtype) for name, parameter in model.named_parameters()]
        self._sender = self._open_sender() if world.is_main else None
        self._probe_ids = probe_ids(model.config.get_text_config().vocab_size)

    def _open_sender(self) -> Sender:
        broadcast = self._config.weight_broadcast
        return open_sender(
            broadcast.type,
            host=self._config.ports.host,
            port=self._config.ports.weights or 0,
            folder=self._config.paths.broadcast,
            bucket_bytes=broadcast.bucket_mib << 20,
            timeout_s=broadcast.timeout_s,
        )

    def publish(self, version: int) -> None:
        """Returns once every engine serves `version`, confirmed. A collective.

        A transfer that breaks (an engine died in it) is begun anew, a few times; weights that arrive wrong are not.

        Raises:
            Refused: an engine holds other weights than were sent; names the tensor.
            DeadlineExceeded: the engines did not get ready, or did not confirm.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                digests, payload = self._send(version, attempt)
                break
            except RuntimeError as error:
                if self._world.size > 1 or attempt == ATTEMPTS:
                    raise
                log.warning("sending version %d broke (attempt %d of %d): %s", version, attempt, ATTEMPTS, error)
        probe = self._probe()
        if self._control is not None:
            self._confirm(version, attempt, digests, probe, payload)

    def _send(self, version: int, attempt: int) -> tuple[dict[str, str], dict]:
        if self._sender is None:
            for _ in full_tensors(self._model, self._dtype):
                pass
            return {}, {}
        go = self._await_go(version, attempt)
        self._sender.join(go.epoch, go.world_size)
        digests: dict[str, str] = {}
        return digests, self._sender.send(self._specs, self._digested(digests))

    def _digested(self, digests: dict[str, str]) -> Iterator[torch.Tensor]:
        for name, tensor in full_tensors(self._model, self._dtype):
            digests[name] = tensor_digest(tensor)
            yield tensor

    def _await_go(self, version: int, attempt: int) -> Go:
        assert self._control is not None
        ready = PolicyReady(
            run_id=self._config.run_id,
            version=version,
            incarnation=self._incarnation,
            attempt=attempt,
            specs=self._specs,
            kind=self._config.weight_broadcast.type,
            host=self._config.ports.host,
            port=self._config.ports.weights or 0,
        )
        deadline_s = self._config.inference.start_timeout_s + self._config.weight_broadcast.timeout_s
        reply = self._control.ask(ready, what=f"the engines to take version {version}", deadline_s=deadline_s)
        assert isinstance(reply, Go), reply
        return reply

    def _confirm(self, version: int, attempt: int, digests: dict[str, str], probe: Probe, payload: dict) -> None:
        assert self._control is not None
        sent = PolicySent(
            run_id=self._config.run_id,
            version=version,
            attempt=attempt,
            digests=digests,
            probe=probe,
            payload=payload,
        )
        self._control.ask(
            sent,
            what=f"the engines to confirm version {version}",
            deadline_s=self._config.weight_broadcast.timeout_s,
        )

    @torch.no_grad()
    def _probe(self) -> Probe:
        """A forward pass of the fixed prompt; a collective."""
        ids = self._probe_ids
        count = len(ids)
        tokens = build_tokens(
            ids=ids, loss_mask=[0] * count, logprobs=[0.0] * count, advantages=[0.0] * count, versions=[-1] * count
        )
        row = MicroBatch(tokens=tokens, lengths=[count], temperatures=[1.0])
        device = self._world.device
        logits = logits_at(self._model, row, torch.arange(count - 1, device=device), device)
        targets = torch.tensor(ids[1:], device=device)
        logprobs, _ = token_logprobs(logits, targets, torch.ones(count - 1, device=device))
        return Probe(ids=ids, logprobs=logprobs.tolist())

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


def served_dtype(config: RunConfig) -> str:
    """Weights travel, and are exported, in the precision in which they are served."""
    dtype = config.inference.model.dtype
    if dtype != "auto":
        return dtype
    return "float32" if config.device == "cpu" else "bfloat16"


def probe_ids(vocabulary: int) -> list[int]:
    """A fixed prompt that touches tokens from all over the vocabulary."""
    return [(17 + 7919 * place) % vocabulary for place in range(PROBE_TOKENS)]


def _served_spec(name: str, parameter: torch.Tensor, dtype: torch.dtype) -> TensorSpec:
    spec = spec_of(name, parameter)
    return TensorSpec(name=spec.name, dtype=str(dtype).removeprefix("torch."), shape=spec.shape)
