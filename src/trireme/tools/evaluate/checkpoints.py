"""`uv run eval --weights-dir outputs/weights`: evaluate one checkpoint after the other in a running engine.

Each is loaded in a way that weights travel in training, and answers nothing before the engine has reported the digest
of every tensor. Rollouts are on disk as they end; the same command, typed again, makes those that are missing.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from rich.console import Console

from trireme.algo.digest import model_digest, tensor_digest
from trireme.algo.weight_checks import first_difference
from trireme.base.errors import ConfigError, TriremeError, WeightsMismatch
from trireme.base.log import get_logger, start_logging
from trireme.base.paths import RunPaths, step_folder, steps_in
from trireme.base.waiting import Waits
from trireme.config.files import find_run_file, read_run, to_table, to_toml
from trireme.config.run import RunConfig
from trireme.journal.versions import Versions
from trireme.launch.folder import hold_folder
from trireme.messages import TensorSpec
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.evaluation.results import description_path
from trireme.tools import progress
from trireme.tools.evaluate.config import EvalConfig, inherit_from_run
from trireme.tools.evaluate.engine import EvaluatedEngine
from trireme.tools.evaluate.report import as_table
from trireme.tools.evaluate.session import EvalSession, prepare, rollout_config, run_sessions
from trireme.tools.export.weights_folder import require_readable
from trireme.tools.policies.chat_endpoint import look_at
from trireme.tools.policies.engine import EnginePolicy, build_running_engine_opener
from trireme.tools.policies.environments import install_missing, open_environments

log = get_logger("eval")

MAX_STEPS_SHOWN = 20
WIDTH = 150  # characters of the table if it does not go to a terminal


def evaluate_checkpoints(config: EvalConfig, *, dry_run: bool) -> int:
    """Return 0 if every rollout has a reward.

    Raises: ConfigError for what was typed, or found in the folder or at the server; TriremeError if the engine went
        away, or another client gave it weights.
    """
    start_logging("eval", "warning")
    evaluation = CheckpointEvaluation(config)
    if dry_run:
        print(to_toml(to_table(evaluation.config)), end="")
        return 0
    return evaluation.run()


class CheckpointEvaluation:
    """The checkpoints of a folder, one after the other in one engine. Runs once."""

    def __init__(self, config: EvalConfig) -> None:
        """Find out what is evaluated, and where. Raises: ConfigError with what cannot be evaluated."""
        weights = config.weights_dir

        assert weights is not None
        is_base_alone = config.eval_base and config.steps == (0,)  # the run may have saved no weights yet
        if not weights.is_dir() and not is_base_alone:
            others = sorted(folder for folder in Path("outputs").glob("**/weights") if folder.is_dir())[:3]
            hint = f" There are {', '.join(map(str, others))}." if others else ""
            raise ConfigError(
                f"--weights-dir {weights} is no folder - expected one with `step_N` folders, as a run has in "
                f"`weights/`.{hint}"
            )
        # environments, sampling and lengths are those of the run that wrote the checkpoints, unless they are typed
        run_folder = weights.resolve().parent
        self._trained_by: RunConfig | None = None  # the run that wrote the checkpoints, if its folder is around them
        with suppress(ConfigError):  # no run, or one of `sft`, which has no environments
            self._trained_by = read_run(RunConfig, find_run_file(run_folder, "orchestrator"))
            config = inherit_from_run(config, self._trained_by)

        if not config.env:
            raise ConfigError(
                "no environment is named, and there is no run around the checkpoints that says which "
                f"({run_folder / 'configs'}) - expected one. Add `--env.id my-env`."
            )

        self.config = config = prepare(config)
        self._steps = {} if is_base_alone else find_steps(weights, config.steps)
        self._output = config.output_dir or run_folder / "evals"
        self._models: dict[str, tuple[int, Path | None]] = {"base": (0, None)} if config.eval_base else {}
        # all files are looked at before the first evaluation, which may take hours
        for step, folder in self._steps.items():
            require_readable(folder)
            if step or not config.eval_base:
                self._models[f"step_{step}"] = step, folder
        # only an engine of ours can be given weights
        url = config.client.base_url
        self._server = asyncio.run(look_at(url, key=config.key))
        if self._server.weights is None:
            raise ConfigError(
                f"{url} answers, and is no engine that can be given weights: it has no /weight_info - expected one "
                "that was started with `uv run inference …`, which is vLLM with our weight path (and the same "
                "TRIREME_TOKEN, where there is one). Start one; or leave `--weights-dir` out, to evaluate the model "
                "that it serves."
            )
        self._engine: EvaluatedEngine | None = None  # once it may have been given weights

    def run(self) -> int:
        output = self._output
        with hold_folder(RunPaths(output)):
            install_missing(self.config.env)
            try:
                # results are on disk as they come, so the user learns how to continue and what the engine holds
                evaluated = asyncio.run(self._evaluate())
            except (TriremeError, KeyboardInterrupt):
                if self._engine is not None:
                    progress.show(
                        f"What was answered so far is kept in {output}: type the same command again for the rest. "
                        f"{self._engine.url} was left with {self._engine.holds}."
                    )
                raise
        Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(as_table(evaluated))
        progress.show(f"every rollout: {output}/step_N/ENV.jsonl (`trireme eval tui {output}`)")
        return 1 if any(session.num_failed for _, sessions in evaluated for session in sessions) else 0

    async def _evaluate(self) -> list[tuple[str, list[EvalSession]]]:
        output, config = self._output, self.config
        waits = Waits("the evaluation", output / "logs")
        run, pictures = rollout_config(config), output / "pictures"
        open_policy = build_running_engine_opener(
            self._server, self._tokenizer_name(), run, waits, trained=False, pictures=pictures
        )

        async with AsyncExitStack() as stack:
            policy = await stack.enter_async_context(open_policy())
            transfer = output / ".transfer"
            stack.callback(shutil.rmtree, transfer, ignore_errors=True)
            engine = EvaluatedEngine(policy, config, self._server, transfer)
            # whether the engine may be used, and with these checkpoints, before the environments take their time
            await engine.take()
            engine.require_same_model(self._steps)
            loading = open_environments(config.env, output / "logs", waits, seed=config.seed)
            environments = await stack.enter_async_context(loading)
            self._engine = engine
            # a wrong checkpoint leaves the engine usable, so it gets its base model back; one that is gone cannot
            try:
                evaluated = [
                    (label, await self._evaluate_model(label, environments, policy, engine)) for label in self._models
                ]
            except (ConfigError, WeightsMismatch):
                with suppress(WeightsMismatch):  # the first error says more
                    await engine.restore()
                raise
            await engine.restore()
        return evaluated

    def _tokenizer_name(self) -> str:
        """Return a folder with the tokenizer. Checkpoints have one, and so have base models that are folders."""
        base = self.config.model.base
        folders = [*self._steps.values(), *map(Path, filter(None, (base, *self._server.models)))]
        found = next((str(folder) for folder in folders if (folder / "tokenizer.json").is_file()), None)
        return found or base or next(iter(self._server.models), "")

    async def _evaluate_model(
        self, label: str, environments: list[Environment], policy: EnginePolicy, engine: EvaluatedEngine
    ) -> list[EvalSession]:
        step, folder = self._models[label]
        settings = {"base_url": self.config.client.base_url, "step": step, "checkpoint": label}
        if folder is None:
            settings["model"] = self._server.base_model

        sessions = []
        for environment in environments:
            session = EvalSession(environment, policy, self.config, settings=settings, version=step)
            path = step_folder(self._output, step) / f"{environment.name}.jsonl"
            session.resume(path, description_path(path))
            sessions.append(session)
        # a finished model is not loaded again, but its files must still be the ones that were evaluated
        is_done = all(session.is_done for session in sessions)
        if folder is not None:
            source = engine.open_source(folder)
            if is_done:  # the files may have been written again since then
                digests = await asyncio.to_thread(
                    lambda: {name: tensor_digest(each) for name, each in source.tensors()}
                )
            else:
                digests = await engine.load(label, source)
            self._require_as_confirmed(step, source.specs, digests)
            for session in sessions:
                session.note(weights=model_digest(digests))
        elif not is_done:
            await engine.load_base()
        if not is_done:
            await run_sessions(sessions)
        means = [session.metrics["reward"] for session in sessions if "reward" in session.metrics]
        scored = f"mean reward {sum(means) / len(means):.3f}" if means else "nothing was scored"
        progress.show(f"{label}: {scored}")
        return sessions

    def _require_as_confirmed(self, step: int, specs: list[TensorSpec], digests: dict[str, str]) -> None:
        """Compare a checkpoint with the digests that the run's engines confirmed: files may have changed since.

        Adapters are not compared: the run's engines were given them in another form.

        Raises: ConfigError.
        """
        folder = self._steps[step]
        run_folder = folder.resolve().parent.parent
        versions = Versions(RunPaths(run_folder).journal)
        if self._trained_by is None or (folder / "adapter_config.json").is_file() or not versions.has(step):
            return
        # weights of another precision were rounded, so their digests differ
        if {spec.dtype for spec in specs} != {self._trained_by.served_dtype}:
            return
        differences = [first_difference(each.digests, digests) for each in versions.read(step).confirmations]
        if all(differences):
            raise ConfigError(
                f"{folder} is not what the run's engines confirmed as version {step}: {differences[-1]} - expected the "
                "weights of that version. The files were changed or damaged since. Move the folder away and make it "
                f"again: `trireme export {run_folder} --step {step}`."
            )


def find_steps(weights: Path, wanted: tuple[int, ...]) -> dict[int, Path]:
    """Return the folders of the wanted steps, or of all. Raises: ConfigError if one does not exist."""
    found = steps_in(weights)
    if missing := sorted(set(wanted) - set(found)):
        more = " …" if len(found) > MAX_STEPS_SHOWN else ""
        raise ConfigError(
            f"--steps {','.join(map(str, wanted))}: {weights} has no step {', '.join(map(str, missing))} - it has "
            f"{', '.join(map(str, found[:MAX_STEPS_SHOWN])) or 'none'}{more}. Take some of these; "
            "`trireme export RUN --step N` makes one of a checkpoint."
        )
    if not found:
        raise ConfigError(
            f"{weights} has no `step_N` folders - expected the weights of a run. `trireme export RUN` makes some of "
            "its checkpoints."
        )
    return {step: step_folder(weights, step) for step in sorted(set(wanted)) or found}
