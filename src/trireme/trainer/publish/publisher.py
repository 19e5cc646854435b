"""Sends the trainer's weights to the engines, and does not rest until they have confirmed them.

While they confirm, the trainer may go on as long as its weights stay as they are: gradients of the next batch can be
had meanwhile, its optimizer step cannot. So whatever goes wrong, the same version can be sent again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from transformers import PreTrainedModel

from trireme.algo.digest import tensor_digest
from trireme.algo.weight_checks import first_difference, is_of_adapter, probe_ids
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
from trireme.monitor.spans import Lane
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.parallel.mesh import World
from trireme.trainer.publish.delta import Part, SentWeights, TransferSize
from trireme.trainer.publish.served_weights import served_dtype, served_specs, served_tensors, serves_adapters
from trireme.transport.control import ControlClient
from trireme.transport.weights.backends import Sender, open_sender

log = get_logger("publish")

PROBE_TOKENS = 32
ATTEMPTS = 20
PAUSE_S = 0.25  # after the first attempt that came to nothing; doubles: an engine that died in it is noticed meanwhile
LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class Unconfirmed:
    """A version that is sent, and that engines have yet to say that they hold."""

    version: int
    everywhere: bool
    epoch: str | None
    sent: PolicySent | None  # what rank 0 asks them with


class Publisher:
    """One per rank. Rank 0 talks and sends; the others join in gathering shards."""

    def __init__(
        self,
        config: RunConfig,
        model: PreTrainedModel,
        world: World,
        control: ControlClient | None,
        lane: Lane | None = None,
    ) -> None:
        self._config = config
        self._lane = lane or Lane("publisher")
        self._model = model
        self._world = world
        self._control = control
        self._dtype = getattr(torch, served_dtype(config))
        self._incarnation = uuid.uuid4().hex
        self._num_attempts = 0
        self._failures_in_a_row = 0
        self._unconfirmed: Unconfirmed | None = None
        self._newest = Newest(version=-1, digests={})
        self._specs = served_specs(model, self._dtype)
        self._sender = self._open_sender() if world.is_main else None
        self._sent_weights = SentWeights(world) if config.weight_broadcast.delta else None
        self._base_digests: dict[str, str] = {}  # of what does not change, where there are adapters
        self._confirmed_epoch: str | None = None  # in which engines hold what the slices do
        self._transfer_size: TransferSize | None = None
        self._probe_ids = probe_ids(model.config.get_text_config().vocab_size, PROBE_TOKENS)

    def _open_sender(self) -> Sender:
        broadcast = self._config.weight_broadcast
        return open_sender(
            broadcast.type,
            host=self._config.hosts.trainer[0],
            port=self._config.ports.weights or 0,
            folder=self._config.paths.broadcast,
            bucket_bytes=broadcast.bucket_mib << 20,
            timeout_s=broadcast.timeout_s,
            delta=broadcast.delta,
        )

    def find_newest(self) -> int:
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

    def send_if_new(self, version: int) -> None:
        """Steps that are repeated after a restart make versions that engines have confirmed already. A collective.

        At the newest of these, the weights must be the same as before, to the bit: so it is on CPUs. Where they are
        not, as with some kernels on GPUs, the engines are given what is trained on from here.
        """
        newest = self._world.agree(self._newest.version)
        if version > newest:
            self.send(version)
        elif version == newest and (difference := self._difference_from_newest()):
            log.warning("version %d was made again and differs: %s. Engines get it anew.", version, difference)
            self.send(version)

    def _difference_from_newest(self) -> str | None:
        digests: dict[str, str] = {}
        for _ in self._digested(digests):
            pass
        difference = first_difference(self._newest.digests, digests) if self._world.is_main else None
        return (difference or "on rank 0") if self._world.agree(difference is not None) else None

    def publish(self, version: int, *, everywhere: bool = True) -> None:
        """Returns once engines serve `version`, confirmed. A collective.

        Args:
            everywhere: also to engines that serve it already.

        Raises: as `send` and `confirm`.
        """
        self._send_until_sent(version, everywhere=everywhere)
        self.confirm()

    def send(self, version: int) -> None:
        """Returns once all of it is sent; `confirm` is to be called before any weight changes. A collective.

        A transfer that breaks (an engine or the orchestrator died in it) is begun anew.

        Raises:
            PeerDied: it broke time and again.
            DeadlineExceeded: the engines did not get ready.
        """
        self._send_until_sent(version, everywhere=True)
        if self._is_in_the_way:
            self.confirm()
        elif self._control is not None and self._unconfirmed is not None:
            assert self._unconfirmed.sent is not None
            self._control.tell(self._unconfirmed.sent)

    @property
    def _is_in_the_way(self) -> bool:
        """Of gradients: what lies on the GPU until it is confirmed takes room there. Engines on the same processors,
        that are to make the very next batch with it, would lose more than the trainer gains.
        """
        config = self._config
        return config.weight_broadcast.type == "ipc" or (config.device == "cpu" and config.max_async_level <= 1)

    @property
    def is_confirming(self) -> bool:
        """Whether something is sent, and not confirmed."""
        return self._unconfirmed is not None

    def confirm(self) -> None:
        """Returns once engines serve what was sent last, which is sent again where they lost it. A collective.

        Weights that arrive wrong are not sent again.

        Raises:
            Refused: an engine holds other weights than were sent; names the tensor.
            PeerDied: the transfer broke time and again.
            DeadlineExceeded: the engines did not confirm.
        """
        while (unconfirmed := self._unconfirmed) is not None:
            is_live = unconfirmed.sent is not None and self._ask_to_confirm(unconfirmed.sent)
            if self._sender is not None:
                self._sender.release()
            self._unconfirmed = None
            if self._world.agree(is_live):
                self._confirmed_epoch = unconfirmed.epoch
            else:
                self._pause(unconfirmed.version)
                self._send_until_sent(unconfirmed.version, everywhere=unconfirmed.everywhere)
        self._failures_in_a_row = 0

    def _send_until_sent(self, version: int, *, everywhere: bool) -> None:
        probe = self._probe()  # before any announcement: engines may stand still from there on
        while not self._world.agree(self._attempt(version, probe, everywhere=everywhere)):
            self._pause(version)

    def _pause(self, version: int) -> None:
        """After an attempt that came to nothing.

        Raises: PeerDied after so many that the next would not fare better.
        """
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= ATTEMPTS:
            raise PeerDied(
                f"Version {version} was sent {ATTEMPTS} times, and each time an engine or the orchestrator was gone "
                f"before it was confirmed. Look at {self._config.paths.logs}"
            )
        time.sleep(min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (self._failures_in_a_row - 1)))

    def _attempt(self, version: int, probe: Probe, *, everywhere: bool) -> bool:
        """Whether it is sent now, or live already. A collective."""
        self._num_attempts += 1
        ready = self._announcement(version, everywhere)
        answer = self._announce(ready) if self._control is not None else None
        kind = _ANSWERS[self._world.agree(_ANSWERS.index(type(answer)) if answer is not None else 0)]
        if kind is not Go:
            return kind is Live
        epoch = self._meet(ready, answer)
        if not self._world.agree(epoch is not None):
            return False
        digests: dict[str, str] = {}
        is_first = bool(self._world.agree(epoch is None or epoch != self._confirmed_epoch))
        self._confirmed_epoch = None
        payload = self._send(version, self._specs_to_send(is_first), self._parts(digests, is_first))
        if not self._world.agree(payload is not None):
            return False
        reach("trainer.sent", rank=self._world.rank)
        sent = None if self._control is None else self._question(version, digests, probe, payload or {})
        self._unconfirmed = Unconfirmed(version, everywhere, epoch, sent)
        return True

    def _announcement(self, version: int, everywhere: bool) -> PolicyReady:
        return PolicyReady(
            run_id=self._config.run_id,
            version=version,
            incarnation=self._incarnation,
            attempt=self._num_attempts,
            everywhere=everywhere,
            specs=self._specs,
            kind=self._config.weight_broadcast.type,
            host=self._config.hosts.trainer[0],
            port=self._config.ports.weights or 0,
        )

    def _announce(self, ready: PolicyReady) -> Go | Live | Again:
        assert self._control is not None
        deadline_s = self._config.trainer.batch_timeout_s + self._config.weight_broadcast.timeout_s
        with self._lane.doing("wait", step=ready.version, why="engines get ready"):
            reply = self._control.ask(ready, what=f"the engines to take version {ready.version}", deadline_s=deadline_s)
        assert isinstance(reply, (Go, Live, Again)), reply
        if isinstance(reply, Again):
            log.warning("version %d: attempt %d came to nothing: %s", ready.version, ready.attempt, reply.reason)
        return reply

    def _meet(self, ready: PolicyReady, go: Go | Live | Again | None) -> str | None:
        """Returns when the engines listen, and in which epoch; None where they do not. Other ranks meet nobody."""
        if self._sender is None:
            return None
        assert isinstance(go, Go), go
        try:
            return self._join(self._sender, ready, go)
        except (RuntimeError, OSError) as error:
            self._give_up(ready.version, error)
            return None

    def _join(self, sender: Sender, ready: PolicyReady, go: Go) -> str:
        """While engines are waited for, the orchestrator may learn that one of them is gone, or be another orchestrator
        by now, which has told them to meet in another group: nothing is sent yet, so that is the one to go to.
        """
        while True:
            try:
                sender.join(go.epoch, go.world_size, is_wanted=lambda: self._announce(ready) == go)  # noqa: B023
                return go.epoch
            except RuntimeError:
                answer = self._announce(ready)
                if answer == go or not isinstance(answer, Go):
                    raise
                go = answer

    def _give_up(self, version: int, error: Exception) -> None:
        assert self._sender is not None
        log.warning("sending version %d broke: %s", version, error)
        self._sender.close()  # at once: engines that wait in the broken transfer answer nothing else

    def _specs_to_send(self, is_first: bool) -> list[TensorSpec]:
        """Engines that hold adapters keep the base model for as long as their epoch goes on."""
        adapters = [spec for spec in self._specs if is_of_adapter(spec.name)]
        return adapters if adapters and not is_first else self._specs

    def _send(self, version: int, specs: list[TensorSpec], parts: Iterator[Part]) -> dict[str, Any] | None:
        """The payload for the engines; None where the transfer broke.

        All tensors are gathered in any case: the other ranks take part in that.
        """
        payload: dict[str, Any] | None = {}
        if self._sender is not None:
            try:
                payload = self._sender.send(specs, parts)
            except (RuntimeError, OSError) as error:
                self._give_up(version, error)
                payload = None
        for _ in parts:
            pass
        return payload

    def _parts(self, digests: dict[str, str], is_first: bool) -> Iterator[Part]:
        """What is sent of each tensor: all of it or, of a delta, what has changed.

        An epoch goes on only where its last transfer was confirmed by all of its engines. So engines of the epoch that
        was confirmed last hold just what was sent then; any others, and all after a transfer that broke, get all.
        """
        size = self._transfer_size = TransferSize()
        tensors = self._digested(digests, only_adapters=serves_adapters(self._model) and not is_first)
        if self._sent_weights is None:
            return size.counted(tensor for _, tensor in tensors)
        return size.counted(self._sent_weights.patches(tensors, whole=is_first))

    def take_metrics(self) -> dict[str, float]:
        """Of the last transfer, on rank 0; none where there was none since."""
        size, self._transfer_size = self._transfer_size, None
        return size.metrics(sum(prod(spec.shape) for spec in self._specs)) if size is not None else {}

    def _digested(self, digests: dict[str, str], *, only_adapters: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Digests are of all tensors, also where only adapters are gathered again."""
        if only_adapters:
            digests |= self._base_digests
        tensors = served_tensors(self._model, self._dtype, only_adapters=only_adapters)
        for number, (name, tensor) in enumerate(tensors):
            if self._world.is_main:
                digests[name] = tensor_digest(tensor)
            yield name, tensor
            if number == 0:
                reach("trainer.sending", rank=self._world.rank)
        self._base_digests = {name: digest for name, digest in digests.items() if not is_of_adapter(name)}

    def _question(self, version: int, digests: dict[str, str], probe: Probe, payload: dict[str, Any]) -> PolicySent:
        return PolicySent(
            run_id=self._config.run_id,
            version=version,
            attempt=self._num_attempts,
            digests=digests,
            probe=probe,
            payload=payload,
        )

    def _ask_to_confirm(self, sent: PolicySent) -> bool:
        assert self._control is not None
        reply = self._control.ask(
            sent,
            what=f"the engines to confirm version {sent.version}",
            deadline_s=self._config.weight_broadcast.timeout_s + self._config.disk_timeout_s,
        )
        assert isinstance(reply, (Live, Again)), reply
        if isinstance(reply, Again):
            log.warning("version %d: attempt %d was not confirmed: %s", sent.version, sent.attempt, reply.reason)
        return isinstance(reply, Live)

    @torch.no_grad()
    def _probe(self) -> Probe:
        """A forward pass of the fixed prompt; a collective."""
        ids = self._probe_ids
        count = len(ids)
        tokens = build_tokens(
            ids=ids, loss_mask=[1] * count, logprobs=[0.0] * count, advantages=[0.0] * count, versions=[-1] * count
        )
        row = MicroBatch(tokens=tokens, lengths=[count], temperatures=[1.0])
        columns = compute_columns(self._model, row, self._world.device)
        return Probe(ids=ids, logprobs=columns.logprobs.tolist())

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


_ANSWERS: tuple[type, ...] = (Go, Live, Again)
"""What `PolicyReady` may be answered with, by the number under which the ranks agree on it."""
