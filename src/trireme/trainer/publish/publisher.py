"""Publish the trainer's weights: announce a version, send it to the engines, and wait until they confirm it.

While engines confirm, the trainer may compute the gradients of the next batch but must not change its weights. So after
any failure the same version can be sent again.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from trireme.algo.weight_checks import first_difference
from trireme.base.disk import is_full, when_there_is_room
from trireme.base.errors import NotFinite, PeerDied
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.inference import low_bit_error
from trireme.config.run import RunConfig
from trireme.messages import Again, GetNewest, Go, Live, Newest, PolicyReady, PolicySent, Probe, TensorSpec
from trireme.monitor.spans import Lane
from trireme.trainer.out_of_memory import is_out_of_memory
from trireme.trainer.parallel.mesh import World, keep_alive
from trireme.trainer.publish.probe import compute_noise, compute_probe
from trireme.trainer.publish.served_weights import OutgoingWeights, Part
from trireme.transport.control import ControlClient
from trireme.transport.weights.backends import open_sender
from trireme.transport.weights.buckets import num_bytes
from trireme.transport.weights.transfer import Sender

log = get_logger("publish")

ATTEMPTS = 20
BACKOFF_S = 0.25  # after the first failed attempt; doubles, which leaves time to notice an engine that died
LONGEST_BACKOFF_S = 5.0
NOISE_EVERY = 16
"""Versions whose probes are judged by the noise of the first of them: measuring it costs more than the probe."""


@dataclass(frozen=True)
class Unconfirmed:
    """A version that is sent and that engines have not confirmed yet."""

    version: int
    everywhere: bool
    epoch: str | None
    sent: PolicySent | None  # rank 0's request to confirm


class Publisher:
    """Publishes weights; each rank has one. Rank 0 talks and sends, the others take part in gathering shards."""

    def __init__(
        self,
        config: RunConfig,
        model: PreTrainedModel,
        world: World,
        control: ControlClient | None,
        waits: Waits,
        lane: Lane,
    ) -> None:
        self._config = config
        self._lane = lane
        self._model = model
        self._world = world
        self._control = control
        self._waits = waits
        self._dtype = getattr(torch, config.served_dtype)

        # The orchestrator tells a restarted trainer from this one by its incarnation.
        self._incarnation = uuid.uuid4().hex
        self._num_attempts = 0
        self._failures_in_a_row = 0

        self._noise, self._noise_version = 0.0, -NOISE_EVERY  # noise of the probe, and the version of its measurement
        self._lacks_room = False  # on rank 0: for the version that it tried to send last

        # What engines hold, as far as this trainer knows.
        self._unconfirmed: Unconfirmed | None = None
        self._newest = Newest(version=-1, digests={})
        self._weights = OutgoingWeights(model, self._dtype, world, delta=config.weight_broadcast.delta)

        # Only rank 0 sends; the other ranks gather.
        self._sender: Sender | None = None
        if world.is_main:
            broadcast = config.weight_broadcast
            self._sender = open_sender(
                broadcast.type,
                host=config.hosts.trainer[0],
                port=config.ports.weights or 0,
                folder=config.paths.broadcast,
                bucket_bytes=broadcast.bucket_mib << 20,
                timeout_s=broadcast.timeout_s,
                delta=broadcast.delta,
            )

        self._confirmed_epoch: str | None = None  # the epoch whose engines hold what was sent last

    def find_newest(self) -> int:
        """Return the newest version that engines ever confirmed, or -1. A collective."""
        if self._control is not None:
            reply = self._control.ask(
                GetNewest(run_id=self._config.run_id),
                what="the newest version",
                deadline_s=self._config.inference.start_timeout_s,
            )
            assert isinstance(reply, Newest), reply
            self._newest = reply
        return self._world.agree(self._newest.version)

    def send_if_new(self, version: int) -> None:
        """Send a version unless engines have confirmed it already, as when steps are repeated. A collective.

        The newest confirmed version must have the same weights as before, to the bit, as it does on CPUs. If it does
        not, as with some kernels on GPUs, it is published again, so that engines hold what is trained from here on.
        """
        newest = self._world.agree(self._newest.version)
        if version > newest:
            self.send(version)
        elif version == newest and (difference := self._difference_from_newest()):
            log.warning(
                "Replayed version %d differs from the recorded one (%s); sending it again.", version, difference
            )
            self.send(version)

    def _difference_from_newest(self) -> str | None:
        """Return which tensor differs from the newest confirmed version; None if none does. A collective."""
        digests = self._weights.digests()
        difference = first_difference(self._newest.digests, digests) if self._world.is_main else None
        return (difference or "on rank 0") if self._world.agree(difference is not None) else None

    def publish(self, version: int, *, everywhere: bool = True) -> None:
        """Send a version and wait until engines have confirmed it. A collective.

        Args:
            everywhere: also send it to engines that serve it already.

        Raises: as `send` and `confirm`.
        """
        self._send_until_sent(version, everywhere=everywhere)
        self.confirm()

    def send(self, version: int) -> None:
        """Send a version. `confirm` must be called before any weight changes. A collective.

        A transfer that breaks, because an engine or the orchestrator died, is retried.

        Raises:
            PeerDied: it broke in each of `ATTEMPTS` attempts.
            DeadlineExceeded: the engines did not get ready.
            NotFinite: the version's logprobs are not finite.
        """
        self._send_until_sent(version, everywhere=True)

        # With ipc, what was sent stays in GPU memory until engines confirm.
        if self._config.weight_broadcast.type == "ipc":
            self.confirm()
        elif self._control is not None and self._unconfirmed is not None:
            assert self._unconfirmed.sent is not None
            self._control.tell(self._unconfirmed.sent)

    @property
    def is_confirming(self) -> bool:
        """Return whether a version is sent and not confirmed."""
        return self._unconfirmed is not None

    def confirm(self) -> None:
        """Wait until engines serve what was sent last; send it again if they lost it. A collective.

        Raises:
            PeerRefused: an engine holds other weights than were sent; names the tensor. This is not retried.
            PeerDied: the transfer broke in each of `ATTEMPTS` attempts.
            DeadlineExceeded: the engines did not confirm.
        """
        # A version that engines lost is sent again until one attempt is confirmed, or too many have failed.
        while (unconfirmed := self._unconfirmed) is not None:
            is_live = False
            if (sent := unconfirmed.sent) is not None and self._control is not None:
                what = f"the engines to confirm version {sent.version}"
                deadline_s = self._config.weight_broadcast.timeout_s + self._config.disk_timeout_s
                reply = self._control.ask(sent, what=what, deadline_s=deadline_s)
                assert isinstance(reply, (Live, Again)), reply
                if isinstance(reply, Again):
                    log.warning(
                        "version %d: attempt %d was not confirmed: %s", sent.version, sent.attempt, reply.reason
                    )
                is_live = isinstance(reply, Live)

            # Buffers, files or shared memory of the transfer are free again, however it ended.
            if self._sender is not None:
                self._sender.release()
            self._unconfirmed = None

            # A delta may build on this transfer only if all engines confirmed it.
            if self._world.agree(is_live):
                self._confirmed_epoch = unconfirmed.epoch
            else:
                self._back_off(unconfirmed.version)
                self._send_until_sent(unconfirmed.version, everywhere=unconfirmed.everywhere)
        self._failures_in_a_row = 0

    def _send_until_sent(self, version: int, *, everywhere: bool) -> None:
        probe = self._probe(version)  # before the announcement, which may pause engines

        # Weights that are not finite would spoil every rollout, so they never reach an engine.
        if not self._world.agree(all(map(math.isfinite, (*probe.logprobs, probe.noise)))):
            made = f"the step on batch {version - 1} made them" if version else f"{self._config.model.name} has them"
            raise NotFinite(
                f"The probe's logprobs under version {version} are not finite: {made} - finite ones were expected, and "
                "no engine is sent such weights. See `loss` and `grad_norm` in metrics.jsonl. "
                + ("Lower `trainer.optim.lr`." if version else "Use a model whose weights are whole.")
            )

        while not self._world.agree(self._attempt(version, probe, everywhere=everywhere)):
            self._back_off(version)

    def _probe(self, version: int) -> Probe:
        """Compute a version's probe, and the noise by which it is judged when that is due, or after a failure."""
        context = self._config.inference.model.max_model_len or self._config.seq_len
        probe = compute_probe(self._model, self._world.device, context=context)

        age = version - self._noise_version
        if not 0 <= age < NOISE_EVERY or self._failures_in_a_row:
            trained = getattr(torch, self._config.trainer.model.optimization_dtype)
            low_bit = low_bit_error(self._config.inference)
            self._noise = compute_noise(self._model, self._world.device, probe, (trained, self._dtype), low_bit=low_bit)
            self._noise_version, age = version, 0
        return msgspec.structs.replace(probe, noise=self._noise, noise_age=age if self._noise else 0)

    def _back_off(self, version: int) -> None:
        """Wait after a failed attempt.

        Raises:
            PeerDied: it was the last of `ATTEMPTS`.
        """
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= ATTEMPTS:
            raise PeerDied(
                f"Version {version} was sent {ATTEMPTS} times, and each time an engine or the orchestrator died or "
                "failed before it was confirmed, or the disk was full - expected them to stay alive, and room for the "
                f"files. The warnings above name the failures; see also the logs in {self._config.paths.logs}."
            )

        time.sleep(min(LONGEST_BACKOFF_S, BACKOFF_S * 2 ** (self._failures_in_a_row - 1)))

    def _attempt(self, version: int, probe: Probe, *, everywhere: bool) -> bool:
        """Announce and send a version; return whether it is sent, or live already. A collective."""
        # Attempts are numbered, so that the orchestrator knows which of two announcements is the newer one.
        self._num_attempts += 1
        ready = PolicyReady(
            run_id=self._config.run_id,
            version=version,
            incarnation=self._incarnation,
            attempt=self._num_attempts,
            everywhere=everywhere,
            specs=self._weights.specs,
            kind=self._config.weight_broadcast.type,
            host=self._config.hosts.trainer[0],
            port=self._config.ports.weights or 0,
        )

        # All ranks follow rank 0's answer, because gathering the weights needs all of them.
        answer = self._announce(ready) if self._control is not None else None
        kind = _ANSWERS[self._world.agree(_ANSWERS.index(type(answer)) if answer is not None else 0)]
        if kind is not Go:
            return kind is Live

        epoch = self._meet(ready, answer)
        if not self._world.agree(epoch is not None):
            return False

        # From here on, engines may hold a part of a version: nothing is confirmed until they say so.
        digests: dict[str, str] = {}
        is_first = bool(self._world.agree(epoch is None or epoch != self._confirmed_epoch))
        self._confirmed_epoch = None
        specs, parts = self._weights.parts(digests, is_first=is_first)

        # The sender stops early if no engine takes what it sends any more.
        if self._sender is not None:
            self._sender.is_wanted = lambda: self._is_wanted(ready, epoch)
        payload = self._send(version, specs, parts)
        if not self._world.agree(payload is not None):
            self._failures_in_a_row -= self._world.agree(self._wait_for_room(version))  # it had to wait: no failure
            return False
        reach("trainer.sent", rank=self._world.rank)

        # `send` and `confirm` pass this request to the orchestrator.
        sent = None
        if self._control is not None:
            sent = PolicySent(
                run_id=self._config.run_id,
                version=version,
                attempt=self._num_attempts,
                digests=digests,
                probe=probe,
                payload=payload or {},
            )
        self._unconfirmed = Unconfirmed(version, everywhere, epoch, sent)
        return True

    def _is_wanted(self, ready: PolicyReady, epoch: str | None) -> bool:
        """Return whether engines still wait for what is being sent. The other ranks gather tensors meanwhile."""
        answer = self._announce(ready, keeps_alive=False)
        return isinstance(answer, Go) and answer.epoch == epoch

    def _announce(self, ready: PolicyReady, *, keeps_alive: bool = True) -> Go | Live | Again:
        assert self._control is not None
        deadline_s = self._config.trainer.batch_timeout_s + self._config.weight_broadcast.timeout_s
        with self._lane.doing("wait", step=ready.version, why="engines get ready"):
            what = f"the engines to take version {ready.version}"
            reply = self._control.ask(ready, what=what, deadline_s=deadline_s, keeps_alive=keeps_alive)
        assert isinstance(reply, (Go, Live, Again)), reply
        if isinstance(reply, Again):
            log.warning("version %d: attempt %d failed: %s", ready.version, ready.attempt, reply.reason)
        return reply

    def _meet(self, ready: PolicyReady, go: Go | Live | Again | None) -> str | None:
        """Join the engines' group; return its epoch, or None if they do not listen. Only rank 0 meets engines.

        While this waits, the orchestrator may learn that an engine died, or may itself restart, and tell the engines to
        meet in another group. Nothing is sent yet, so the trainer joins that group instead.
        """
        if self._sender is None:
            return None
        while True:
            assert isinstance(go, Go), go
            try:
                self._sender.is_wanted = lambda: self._announce(ready) == go  # noqa: B023
                self._sender.join(go.epoch, go.world_size)
                return go.epoch
            except (RuntimeError, OSError) as error:
                if is_out_of_memory(error):
                    raise
                answer = self._announce(ready) if isinstance(error, RuntimeError) else go
                if answer == go or not isinstance(answer, Go):
                    self._give_up(ready.version, error)
                    return None
                go = answer

    def _give_up(self, version: int, error: Exception) -> None:
        assert self._sender is not None
        log.warning("sending version %d broke: %s", version, error)
        self._sender.close()  # at once, because engines in a broken transfer answer nothing else

    def _send(self, version: int, specs: list[TensorSpec], parts: Iterator[Part]) -> dict[str, Any] | None:
        """Send the tensors; return the payload for the engines, or None if the transfer broke.

        All tensors are gathered in any case, because the other ranks take part in that.
        """
        payload: dict[str, Any] | None = {}
        if self._sender is not None:
            try:
                payload = self._sender.send(specs, parts)
            except (RuntimeError, OSError, SafetensorError) as error:
                if is_out_of_memory(error):
                    raise
                self._give_up(version, error)
                self._lacks_room = self._config.weight_broadcast.type == "filesystem" and is_full(error)
                payload = None

        # A broken transfer on rank 0 must not leave the other ranks in a collective.
        for _ in parts:
            pass
        return payload

    def _wait_for_room(self, version: int) -> bool:
        """Wait until a whole version fits, if the transfer broke because the disk is full. For rank 0.

        Returns whether it had to wait: a disk that has room for this, and still not for the files, is not waited for.

        Raises:
            DeadlineExceeded: the disk was full for `disk_timeout_s` seconds.
        """
        lacked_room, self._lacks_room = self._lacks_room, False
        num_looks = 0
        if lacked_room:
            folder, size = self._config.paths.broadcast, sum(map(num_bytes, self._weights.specs))
            size += size // 100 + (1 << 20)  # for headers, folders, and the last block of each file
            # The other ranks wait in a collective, whose timeout this restarts.
            meanwhile = keep_alive(self._world, timeout_s=self._config.trainer.batch_timeout_s)

            def reserve() -> None:
                nonlocal num_looks
                num_looks += 1
                meanwhile()
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder) as file:  # in contrast to free bytes, this knows quotas
                    os.posix_fallocate(file.fileno(), 0, size)

            when_there_is_room(
                reserve,
                what=f"weights of version {version}",
                folder=folder,
                waits=self._waits,
                deadline_s=self._config.disk_timeout_s,
            )
        return num_looks > 1

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the last transfer on rank 0, once."""
        return self._weights.take_metrics()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


_ANSWERS: tuple[type, ...] = (Go, Live, Again)
"""The replies to `PolicyReady`, by the number under which the ranks agree on one."""
