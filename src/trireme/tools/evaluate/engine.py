"""An engine that an evaluation gives one checkpoint after the other, and that confirms each.

The name of its weights shows which client gave it weights last:

    default              no process: its base model
    eval-ID-base         an evaluation, and it is the base model
    eval-ID-loading      an evaluation that did not finish a transfer
    eval-ID-step_10      an evaluation that has left these weights behind, or is running
    10                   a training run: other weights would come under its rollouts
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from trireme.algo.digest import tensor_digest
from trireme.base.errors import ConfigError, PeerDied
from trireme.base.log import get_logger
from trireme.messages import InitInfo, UpdateInfo
from trireme.orchestrator.engines.responses import PauseInfo
from trireme.orchestrator.weights.engine_update import join, load, require_confirmed
from trireme.tools import progress
from trireme.tools.evaluate.config import EvalConfig
from trireme.tools.export.weights_folder import Source, find_model, has_adapters, open_model, shape_difference
from trireme.tools.policies.chat_endpoint import Server
from trireme.tools.policies.engine import FRESH, LOADING, EnginePolicy, StandingPool, WeightsReplaced
from trireme.transport.weights.backends import FilesystemSender

log = get_logger("eval")

BUCKET_BYTES = 64 << 20
"""Size of the files that merged adapters are written to."""
OWN, BASE = "eval-", "base"
BASE_IN_WORDS = "its base model"


class EvaluatedEngine:
    """One engine, for one evaluation at a time."""

    def __init__(self, policy: EnginePolicy, config: EvalConfig, server: Server, folder: Path) -> None:
        """
        Args:
            folder: for weights that the engine cannot read in place.
        """
        pool = policy.runner.pool
        assert isinstance(pool, StandingPool), pool
        self.engine = pool.engines[0]
        self.url = self.engine.url
        self.holds = "the weights that it had"  # in words
        self._pool = pool
        self._config = config
        self._id = f"{OWN}{uuid.uuid4().hex[:6]}"
        self._has_loaded = False
        self._base_model = config.model.base or server.base_model
        self._base = find_model(self._base_model) if self._base_model else None  # on this machine
        self._dtype = "float32"  # type of the model that adapters are merged into
        self._folder = folder.resolve()

    async def take(self) -> None:
        """Make it this evaluation's: with `take_over`, also if it serves a training run or is paused for one.

        Raises:
            ConfigError: another client uses it.
            PeerDied: it is gone.
        """
        over = self._config.take_over
        await self.engine.learn_size()
        name, report = await self.engine.weight_version(), (await self.engine.weight_reports())[0]
        is_paused = (await self.engine.get("is_paused", returns=PauseInfo)).is_paused
        if is_paused and name == FRESH and not over:
            raise ConfigError(
                f"{self.url} is paused: a client is about to give it weights, perhaps a training run that starts - "
                "expected an engine that no other client uses. Wait, or start another; if no client does, restart it "
                "or add `--take-over`."
            )
        # weights that an earlier evaluation left behind may be replaced
        if not over and name != FRESH and not name.startswith(OWN):
            raise ConfigError(
                f"{self.url} serves version {name} of a training run - expected an engine that no run gives weights "
                "to: a checkpoint would be loaded under that run's rollouts. Start another (`uv run inference …` with "
                "a `--server.port` of its own) and name it with `--client.base-url`; or, if that run is over, add "
                "`--take-over`."
            )
        # from here on, other names mean that another client has given it weights
        self._pool.serves = name  # the name of its weights, when this evaluation last looked
        is_fresh = name == FRESH and not report.digests
        if is_fresh or (name.startswith(OWN) and name.endswith(f"-{BASE}")):
            self.holds = BASE_IN_WORDS

        if is_paused:
            await self.engine.post("resume")
        # adapters are merged in the type that the engine computes in
        with suppress(PeerDied, KeyError, TypeError):  # float32 loses nothing if it reports no type
            about = await self.engine.get("server_info?config_format=json")
            dtype = str(about["vllm_config"]["model_config"]["dtype"]).removeprefix("torch.")
            self._dtype = dtype if dtype in ("bfloat16", "float16") else self._dtype

    def require_same_model(self, steps: dict[int, Path]) -> None:
        """Raises: ConfigError if a checkpoint is of another model than the engine's, as far as files show."""
        if self._base is None:
            log.warning(
                "the base model of %s (%s) is not on this machine: checkpoints are not compared with it before they "
                "are loaded, and the engine cannot be given it back. `--model.base FOLDER` says where it is.",
                self.url,
                self._base_model,
            )
            return
        # shapes are read from headers, so this is quick for all checkpoints
        shapes = open_model(self._base).shapes
        for step, folder in steps.items():
            if difference := shape_difference(shapes, self.open_source(folder).shapes):
                raise ConfigError(
                    f"{folder} is no checkpoint of the model that {self.url} serves ({self._base}): {difference} - "
                    "expected the same tensors. Start an engine with the model that this run began with, or leave "
                    f"step {step} out."
                )

    def open_source(self, folder: Path) -> Source:
        if not has_adapters(folder):
            return open_model(folder)
        # This imports transformers, which takes seconds.
        from trireme.tools.export.merging import open_merged

        return open_merged(folder, base=self._config.model.base, dtype=self._dtype)

    async def require_ours(self) -> None:
        """Raises: WeightsReplaced if another client has given it weights since."""
        name = await self.engine.weight_version()
        if name != self._pool.serves:
            raise WeightsReplaced(
                f"{self.url} serves {name!r} now, it served {self._pool.serves!r} when this evaluation last looked - "
                "expected no other client to give it weights meanwhile. It is left as it is. Look at who uses it, then "
                "type the same command again: what was answered so far is kept."
            )

    async def load(self, name: str, source: Source) -> dict[str, str]:
        """Give it weights. Returns their digests, once the engine has reported the same and serves.

        Args:
            name: for messages, and in the name of its weights; `BASE` for its base model.

        Raises:
            WeightsMismatch: it holds something else.
            PeerDied: it is gone, or could not take them.
            WeightsReplaced: another client has given it weights.
        """
        with progress.stage(f"loading {name} into the engine", limit_s=self._config.client.timeout_s):
            await self.require_ours()
            await self.engine.post("pause?mode=wait")  # the pause also forgets what was computed with other weights
            # named as unfinished first: a crash must not leave a part of it under a good name
            self._has_loaded, self.holds = True, f"a part of {name}"
            await self._name(f"{self._id}{LOADING}")
            digests = await self._transfer(name, source)
            await self._name(f"{self._id}-{name}")
            await self.engine.post("resume")
            self.holds = BASE_IN_WORDS if name == BASE else name
        return digests

    async def load_base(self) -> None:
        """Give it its base model, unless it has held that from the beginning. Raises: ConfigError; as `load`."""
        # renamed only: its weights are the ones that it was started with
        if self.holds == BASE_IN_WORDS:
            await self.require_ours()
            await self._name(f"{self._id}-{BASE}")
            return
        if self._base is None:
            raise ConfigError(
                f"{self.url} holds {self._pool.serves!r}, and its base model ({self._base_model}) is not on this "
                "machine - expected an engine with its base model. Restart it, say where the model is (`--model.base "
                "FOLDER`), or leave it out: `--no-eval-base`."
            )
        await self.load(BASE, self.open_source(self._base))

    async def restore(self) -> None:
        """Give the engine its base model back, or show what it holds.

        Raises: WeightsReplaced if another client has given it weights.
        """
        await self.require_ours()
        # an evaluation leaves the engine as it found it, if the base model is on this machine
        if self._has_loaded and self.holds != BASE_IN_WORDS:
            if self._base is None:
                progress.show(f"{self.url} holds {self.holds} now, not its base model.")
                return
            await self.load(BASE, self.open_source(self._base))
        if self.holds == BASE_IN_WORDS:
            await self._name(FRESH)  # the name that it had before the first update

    async def _name(self, name: str) -> None:
        await self.engine.post("update_weight_version", {"new_version": name})
        self._pool.serves = name

    async def _transfer(self, name: str, source: Source) -> dict[str, str]:
        """Have the engine read a model's files, or those of a merged one. Returns the digest of each tensor.

        Raises: WeightsMismatch if it holds something else.
        """
        info = InitInfo(
            kind="filesystem",
            host="",
            port=0,
            epoch=f"{self._id}/{name}/{uuid.uuid4().hex[:8]}",
            rank_offset=1,
            world_size=1 + self.engine.num_workers,
            bucket_bytes=BUCKET_BYTES,
            timeout_s=self._config.client.timeout_s,
        )
        digests: dict[str, str] = {}

        def tensors() -> Iterator[torch.Tensor]:
            for name, tensor in source.tensors():
                digests[name] = tensor_digest(tensor)
                yield tensor

        def write() -> dict[str, Any]:
            # adapters exist merged in memory only, so their sum is written to files for the engine
            if source.folder is None:
                return FilesystemSender(self._folder, bucket_bytes=BUCKET_BYTES).send(source.specs, tensors())
            for _ in tensors():  # only for their digests
                pass
            return {"folder": str(source.folder), "bucket_bytes": None}

        # digests are computed here while files are read or written, and compared with the engine's
        await join(self.engine, info)
        payload = await asyncio.to_thread(write)
        reports = await load(self.engine, UpdateInfo(source.specs, payload))
        require_confirmed(self.engine, reports, digests, name=name)
        return digests
