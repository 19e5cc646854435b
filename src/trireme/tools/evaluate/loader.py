"""Checkpoints into the engine that is evaluated, and its base model back. Torch is imported when it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.tools.environments.progress import Progress
from trireme.tools.evaluate.checkpoints import Plan, require_as_confirmed
from trireme.tools.evaluate.engine import EngineState, EvaluatedEngine

if TYPE_CHECKING:
    from trireme.tools.export.weights_folder import Loadable, Transfers

log = get_logger("eval")


@dataclass
class Loader:
    """Puts checkpoints into the engine, and its base model back."""

    plan: Plan
    engine: EvaluatedEngine
    before: EngineState
    transfers: Transfers
    base_model: str | None
    dtype: str
    progress: Progress
    has_loaded: bool = False

    def require_same_model(self) -> None:
        """Raises: ConfigError where a checkpoint is of another model than the engine's, as far as files can tell."""
        from trireme.tools.export.weights_folder import ModelFiles, shape_difference

        base = self._base()
        if base is None:
            log.warning(
                "the base model of %s (%s) is not here: checkpoints are not compared with it before they are loaded, "
                "and it cannot be given back. `--model.base FOLDER` says where it is.",
                self.engine.engine.url,
                self.base_model,
            )
            return
        for step, folder in self.plan.steps.items():
            source = self._source(folder)
            shapes = ModelFiles(base).shapes
            if difference := shape_difference(shapes, {spec.name: tuple(spec.shape) for spec in source.specs}):
                raise ConfigError(
                    f"{folder} is no checkpoint of the model that {self.engine.engine.url} serves ({base}): "
                    f"{difference} - expected the same tensors. Start an engine with the model that this run began "
                    f"with, or leave step {step} out."
                )

    def _base(self) -> Path | None:
        """Where it lies here, whole."""
        from trireme.tools.export.weights_folder import holds_model, local_folder

        folder = local_folder(self.base_model) if self.base_model else None
        return folder if folder is not None and holds_model(folder) else None

    def _source(self, folder: Path) -> Any:
        from trireme.tools.export.weights_folder import open_source

        return open_source(folder, base=self.plan.config.model.base, dtype=self.dtype)

    def _loadable(self, name: str, folder: Path) -> Loadable:
        from trireme.tools.export.weights_folder import Loadable

        return Loadable(name, self._source(folder), self.transfers)

    async def load(self, step: int) -> str | None:
        """Returns the digest of all tensors; None where the engine has the base model that it began with."""
        folder = self.plan.models[step]
        if folder is None:
            return await self._load_base()
        label = self.plan.label[step]
        weights = self._loadable(label, folder)
        self.has_loaded = True
        with self.progress.stage(f"loading {label} into the engine", limit_s=self.plan.config.client.timeout_s):
            await self.engine.load(weights)
        require_as_confirmed(self.plan, step, weights.specs, weights.digests)
        return weights.digest

    async def _load_base(self) -> str | None:
        if self.before.holds_base and not self.has_loaded:
            await self.engine.keep_base()
            return None
        base = self._base()
        if base is None:
            raise ConfigError(
                f"{self.engine.engine.url} holds {self.before.version!r}, and its base model ({self.base_model}) is "
                "not here to be given back - expected an engine with its base model. Restart it, say where the model "
                "is (`--model.base FOLDER`), or leave it out: `--no-eval-base`."
            )
        self.has_loaded = True
        with self.progress.stage("giving the engine its base model", limit_s=self.plan.config.client.timeout_s):
            await self.engine.load(self._loadable("base", base), is_base=True)
        return None

    async def restore(self) -> None:
        """The engine as it was, or a word on what it holds now.

        Raises: WeightsReplaced where it is somebody else's now.
        """
        await self.engine.require_ours()
        if self.engine.holds_base or not self.has_loaded:
            if self.before.holds_base or self.engine.holds_base:
                await self.engine.leave()
            return
        if self.plan.config.restore_base and self._base() is not None:
            await self._load_base()
            await self.engine.leave()
            return
        self.progress.say(f"{self.engine.engine.url} holds {self.engine.holds} now, not its base model.")
