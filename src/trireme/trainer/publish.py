"""Sends the trainer's weights to the engines, and does not rest until they have confirmed them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from trireme.algo.compare import first_difference
from trireme.algo.digest import tensor_digest
from trireme.algo.logprobs import token_logprobs
from trireme.base.errors import PeerDied
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.config.run import RunConfig
from trireme.messages import (
    Again,
    GetNewest,
    Go,
    Live,
    MicroBatch,
    Newest,
    PolicyReady,
    PolicySent,
    Probe,
    TensorSpec,
    build_tokens,
)
from trireme.trainer.mesh import World
from trireme.trainer.model import full_tensors, logits_at
from trireme.transport.control import ControlClient
from trireme.transport.weights.buckets import spec_of
from trireme.transport.weights.kinds import Sender, open_sender

log = get_logger("publish")

PROBE_TOKENS = 32
ATTEMPTS = 20
PAUSE_S = 0.25  # after the first attempt that came to nothing; doubles: an engine that died in it is noticed meanwhile
LONGEST_PAUSE_S = 5.0


class Publisher:
    """One per rank. Rank 0 talks and sends; the others join in gathering shards."""

    def __init__(self, config: RunConfig, model: PreTrainedModel, world: World, control: ControlClient | None) -> None:
        self._config = config
        self._model = model
        self._world = world
        self._control = control
        self._dtype = getattr(torch, served_dtype(config))
        self._incarnation = uuid.uuid4().hex
        self._num_attempts = 0
        self._newest = Newest(version=-1, digests={})
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

    def look_back(self) -> int:
        """The newest version that engines ever confirmed, or -1: up to there, steps are repeated. A collective."""
        if self._control is not None:
            reply = self._control.ask(
                GetNewest(run_id=self._config.run_id),
                what="how far the run had come",
                deadline_s=self._config.inference.start_timeout_s,
            )
            assert isinstance(reply, Newest), reply
            self._newest = reply
        return self._world.agree(self._newest.version)

    def publish_if_new(self, version: int) -> None:
        """Steps that are repeated after a restart make versions that engines have confirmed already. A collective.

        At the newest of these, the weights must be the same as before, to the bit: so it is on CPUs. Where they are
        not, as with some kernels on GPUs, the engines are given what is trained on from here.
        """
        newest = self._world.agree(self._newest.version)
        if version > newest:
            self.publish(version)
        elif version == newest and (difference := self._difference_from_newest()):
            log.warning("version %d was made again and differs: %s. Engines get it anew.", version, difference)
            self.publish(version)

    def _difference_from_newest(self) -> str | None:
        digests: dict[str, str] = {}
        for _ in self._digested(digests):
            pass
        difference = first_difference(self._newest.digests, digests) if self._world.is_main else None
        return (difference or "on rank 0") if self._world.agree(difference is not None) else None

    def publish(self, version: int, *, everywhere: bool = True) -> None:
        """Returns once engines serve `version`, confirmed. A collective.

        A transfer that breaks (an engine or the orchestrator died in it) is begun anew; weights that arrive wrong are
        not.

        Args:
            everywhere: also to engines that serve it already.

        Raises:
            Refused: an engine holds other weights than were sent; names the tensor.
            DeadlineExceeded: the engines did not get ready, or did not confirm.
        """
        for number in range(ATTEMPTS):
            if self._world.agree(self._attempt(version, everywhere=everywhere)):
                return
            time.sleep(min(LONGEST_PAUSE_S, PAUSE_S * 2**number))
        raise PeerDied(
            f"Version {version} was sent {ATTEMPTS} times, and each time an engine or the orchestrator was gone before "
            f"it was confirmed. Look at {self._config.paths.logs}"
        )

    def _attempt(self, version: int, *, everywhere: bool) -> bool:
        """Whether it is live now. A collective."""
        self._num_attempts += 1
        ready = self._announcement(version, everywhere)
        answer = self._announce(ready) if self._control is not None else None
        kind = _ANSWERS[self._world.agree(_ANSWERS.index(type(answer)) if answer is not None else 0)]
        if kind is not Go:
            return kind is Live
        digests: dict[str, str] = {}
        payload = self._send(ready, answer, self._digested(digests))
        if not self._world.agree(payload is not None):
            return False
        reach("trainer.sent", rank=self._world.rank)
        probe = self._probe()
        return self._control is None or self._confirm(version, digests, probe, payload or {})

    def _announcement(self, version: int, everywhere: bool) -> PolicyReady:
        return PolicyReady(
            run_id=self._config.run_id,
            version=version,
            incarnation=self._incarnation,
            attempt=self._num_attempts,
            everywhere=everywhere,
            specs=self._specs,
            kind=self._config.weight_broadcast.type,
            host=self._config.ports.host,
            port=self._config.ports.weights or 0,
        )

    def _announce(self, ready: PolicyReady) -> Go | Live | Again:
        assert self._control is not None
        deadline_s = self._config.trainer.batch_timeout_s + self._config.weight_broadcast.timeout_s
        reply = self._control.ask(ready, what=f"the engines to take version {ready.version}", deadline_s=deadline_s)
        assert isinstance(reply, (Go, Live, Again)), reply
        if isinstance(reply, Again):
            log.warning("version %d: attempt %d came to nothing: %s", ready.version, ready.attempt, reply.reason)
        return reply

    def _send(
        self, ready: PolicyReady, go: Go | Live | Again | None, tensors: Iterator[torch.Tensor]
    ) -> dict[str, Any] | None:
        """The payload for the engines; None where the transfer broke.

        All tensors are gathered in any case: the other ranks take part in that.
        """
        payload: dict[str, Any] | None = {}
        if self._sender is not None:
            assert isinstance(go, Go), go
            try:
                self._meet(ready, go)
                payload = self._sender.send(self._specs, tensors)
            except (RuntimeError, OSError) as error:
                log.warning("sending version %d broke: %s", ready.version, error)
                self._sender.close()  # at once: engines that wait in the broken transfer answer nothing else
                payload = None
        for _ in tensors:
            pass
        return payload

    def _meet(self, ready: PolicyReady, go: Go) -> None:
        """Returns when the engines listen.

        While they are waited for, the orchestrator may learn that one of them is gone, or be another orchestrator by
        now, which has told them to meet in another group: nothing is sent yet, so that is the one to go to.
        """
        assert self._sender is not None
        while True:
            try:
                return self._sender.join(go.epoch, go.world_size, is_wanted=lambda: self._announce(ready) == go)  # noqa: B023
            except RuntimeError:
                answer = self._announce(ready)
                if answer == go or not isinstance(answer, Go):
                    raise
                go = answer

    def _digested(self, digests: dict[str, str]) -> Iterator[torch.Tensor]:
        for number, (name, tensor) in enumerate(full_tensors(self._model, self._dtype)):
            if self._world.is_main:
                digests[name] = tensor_digest(tensor)
            yield tensor
            if number == 0:
                reach("trainer.sending", rank=self._world.rank)

    def _confirm(self, version: int, digests: dict[str, str], probe: Probe, payload: dict) -> bool:
        assert self._control is not None
        sent = PolicySent(
            run_id=self._config.run_id,
            version=version,
            attempt=self._num_attempts,
            digests=digests,
            probe=probe,
            payload=payload,
        )
        reply = self._control.ask(
            sent,
            what=f"the engines to confirm version {version}",
            deadline_s=self._config.weight_broadcast.timeout_s + self._config.disk_timeout_s,
        )
        assert isinstance(reply, (Live, Again)), reply
        if isinstance(reply, Again):
            log.warning("version %d: attempt %d was not confirmed: %s", version, self._num_attempts, reply.reason)
        return isinstance(reply, Live)

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


_ANSWERS: tuple[type, ...] = (Go, Live, Again)
"""What `PolicyReady` may be answered with, by the number under which the ranks agree on it."""


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
