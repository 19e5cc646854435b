"""`uv run eval --weights-dir outputs/weights --env.id my-env`: one checkpoint after the other in a running engine.

Each is loaded on the way that weights take in training, and is asked nothing before the engine has reported the digest
of every tensor. Rollouts are on disk as they end; what is missing is made when the same command is typed again.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from trireme.base.errors import ConfigError, TriremeError, WeightsMismatch
from trireme.base.log import start_logging
from trireme.base.network import is_loopback
from trireme.base.paths import atomic_write, step_folder
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.config.load import load_config
from trireme.config.run import RunConfig
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.evaluation.results import description_path
from trireme.orchestrator.rollout.chat import ChatTokenizer, open_chat_tokenizer
from trireme.orchestrator.rollout.runner import RolloutRunner
from trireme.tools.environments.policy_endpoint import Server, look_at
from trireme.tools.environments.policy_engine import EnginePolicy, open_standing_pool
from trireme.tools.environments.progress import Progress
from trireme.tools.evaluate.checkpoints import Plan, read_plan
from trireme.tools.evaluate.config import EvalConfig, with_environments
from trireme.tools.evaluate.engine import EngineState, EvaluatedEngine
from trireme.tools.evaluate.loader import Loader
from trireme.tools.evaluate.report import Evaluated, as_json, mean_reward, to_table
from trireme.tools.evaluate.session import (
    Session,
    install_environments,
    lock_results,
    open_environments,
    rollout_config,
    run_sessions,
)

SUMMARY = "summary.json"

WIDTH = 150  # characters of the table where it does not go to a terminal


def eval_weights(argv: list[str]) -> int:
    """Returns 0 where every rollout has a reward.

    Raises:
        ConfigError: for what was typed, found in the folder, or found at the server.
        TriremeError: the engine went away, or was given other weights by somebody else.
    """
    config, invocation = load_config(with_environments(argv), EvalConfig, program="eval")
    if config.weights_dir is None:
        from trireme.tools.evaluate.run import eval_served

        return eval_served(config, dry_run=invocation.dry_run)
    start_logging("eval", "warning")
    plan = read_plan(config)
    _require_readable(plan)
    server = _look(plan)
    if invocation.dry_run:
        print(describe(plan, server))
        return 0
    return CheckpointEvaluation(plan, server).run()


def _require_readable(plan: Plan) -> None:
    """Headers only. Raises: ConfigError."""
    from trireme.tools.export.weights_folder import require_readable

    for folder in plan.steps.values():
        require_readable(folder)


def _look(plan: Plan) -> Server:
    """Raises: ConfigError where nobody answers, or it is no engine of ours."""
    url = plan.config.client.base_url
    server = asyncio.run(look_at(url, key=plan.config.key))
    if not server.is_ours:
        raise ConfigError(
            f"{url} answers, and is no engine that can be given weights: it has no /weight_info - expected one that "
            "was started with `uv run inference …`, which is vLLM with our weight path (and the same TRIREME_TOKEN, "
            "where there is one). Start one; or leave `--weights-dir` out, to evaluate the model that it serves."
        )
    return server


def describe(plan: Plan, server: Server) -> str:
    config = plan.config
    labels = ", ".join(plan.label.values())
    names = ", ".join(str(each.name) for each in config.env)
    examples = config.num_examples or "all"
    return "\n".join(
        [
            f"engine       {server.root}, which serves {', '.join(server.models) or 'a model'}",
            f"models       {labels}",
            f"environments {names}: {examples} examples x {config.rollouts_per_example}",
            f"sampling     {config.evaluation.sampling.model_dump(exclude_defaults=True) or 'temperature 1'}",
            f"results      {plan.output}/step_N/ENV.jsonl",
        ]
    )


@dataclass
class CheckpointEvaluation:
    """Runs once."""

    plan: Plan
    server: Server
    progress: Progress = field(default_factory=Progress)
    engine: EvaluatedEngine | None = None  # once it was asked anything

    @property
    def config(self) -> EvalConfig:
        return self.plan.config

    def run(self) -> int:
        with lock_results(self.plan.output):
            install_environments(self.config, self.progress)
            try:
                evaluated = asyncio.run(self._run())
            except (TriremeError, KeyboardInterrupt):
                if self.engine is not None:
                    self.progress.say(self._left_behind(self.engine))
                raise
        with atomic_write(self.plan.output / SUMMARY) as file:
            file.write(as_json(evaluated).encode() + b"\n")
        Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(to_table(evaluated))
        self.progress.say(f"every rollout: {self.plan.output}/step_N/ENV.jsonl (`trireme eval tui {self.plan.output}`)")
        return 1 if any(session.num_failed for _, sessions in evaluated for session in sessions) else 0

    def _left_behind(self, engine: EvaluatedEngine) -> str:
        return (
            f"What was answered so far is kept in {self.plan.output}: type the same command again for the rest. "
            f"{engine.engine.url} was left with {engine.holds}."
        )

    async def _run(self) -> Evaluated:
        waits = Waits("the evaluation", self.plan.output / "logs")
        run = run_config(self.config, self.server, self._tokenizer_folder())
        tokenizer = open_chat_tokenizer(run.model.name)
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(open_standing_pool(run, tokenizer, self.server.root, waits=waits))
            engine = EvaluatedEngine(pool, timeout_s=self.config.client.timeout_s)
            state = await engine.look()
            await engine.take(state, over=self.config.take_over)
            loader = await self._open_loader(engine, state)
            stack.callback(loader.transfers.close)
            opening = open_environments(self.config, self.plan.output / "logs", waits, self.progress)
            environments = await stack.enter_async_context(opening)
            self.engine = engine
            policy = _policy(run, tokenizer, engine)
            try:
                evaluated = [await self._model(step, environments, policy, loader) for step in self.plan.models]
            except (ConfigError, WeightsMismatch):
                await loader.restore()
                raise
            await loader.restore()
        return evaluated

    def _tokenizer_folder(self) -> str:
        """Checkpoints have it with them; so have base models that are folders."""
        folders = [*self.plan.steps.values(), *map(Path, filter(None, (self.config.model.base, *self.server.models)))]
        whole = [folder for folder in folders if (folder / "tokenizer.json").is_file()]
        named = self.config.model.base or next(iter(self.server.models), "")
        return str(whole[0]) if whole else named

    async def _open_loader(self, engine: EvaluatedEngine, state: EngineState) -> Loader:
        from trireme.tools.export.weights_folder import Transfers

        kind = self.config.transfer
        host = _own_address(self.server.root)
        if kind == "auto":
            kind = "filesystem" if is_loopback(host) else "gloo"
        transfers = Transfers(
            kind=kind,
            host=host,
            port=free_port(),
            folder=(self.plan.output / ".transfer").resolve(),
            bucket_bytes=self.config.bucket_mib << 20,
            timeout_s=self.config.client.timeout_s,
        )
        base_model = self.config.model.base or await engine.base_model()
        loader = Loader(self.plan, engine, state, transfers, base_model, await engine.dtype(), self.progress)
        loader.require_same_model()
        return loader

    async def _model(
        self, step: int, environments: list[Environment], policy: EnginePolicy, loader: Loader
    ) -> tuple[str, list[Session]]:
        label = self.plan.label[step]
        sessions = [self._session(step, environment, policy) for environment in environments]
        if not all(session.is_done for session in sessions):
            digest = await loader.load(step)
            for session in sessions:
                session.note(**({"weights": digest} if digest else {}))
            await run_sessions(sessions, self.progress)
        mean = mean_reward(sessions)
        self.progress.say(f"{label}: mean reward {mean:.3f}" if mean is not None else f"{label}: nothing was scored")
        return label, sessions

    def _session(self, step: int, environment: Environment, policy: EnginePolicy) -> Session:
        session = Session(
            environment,
            policy,
            self.config,
            purpose=f"eval-{step}",
            settings={
                "base_url": self.config.client.base_url,
                "step": step,
                "checkpoint": self.plan.label[step],
            },
            version=step,
        )
        path = step_folder(self.plan.output, step) / f"{environment.name}.jsonl"
        session.resume(path, description_path(path))
        return session


def run_config(config: EvalConfig, server: Server, tokenizer: str) -> RunConfig:
    """As far as rollouts go. No seeds: the engine may not have been started for them, see `inference.server`."""
    longest = config.model.max_model_len or server.max_model_len
    if config.model.max_model_len and server.max_model_len:
        longest = min(config.model.max_model_len, server.max_model_len)
    values: dict[str, Any] = {"model.name": tokenizer, "inference.model.max_model_len": longest, "max_async_level": 1}
    return rollout_config(config, values | {"seq_len": longest or RunConfig().seq_len})


def _policy(run: RunConfig, tokenizer: ChatTokenizer, engine: EvaluatedEngine) -> EnginePolicy:
    runner = RolloutRunner(run, engine.pool, tokenizer)
    return EnginePolicy(f"the engine at {engine.engine.url}", runner, run.orchestrator.sampling, trained=False)


def _own_address(url: str) -> str:
    """As the engine reaches us: loopback, or that of the way to it."""
    parts = urlsplit(url)
    host = parts.hostname or "127.0.0.1"
    if is_loopback(host):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, parts.port or 80))
        return str(way.getsockname()[0])
