"""Mirror metrics to Weights & Biases. A thread follows `metrics.jsonl`; the run itself never talks to W&B."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.base.paths import atomic_write
from trireme.config.files import without_secrets
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.monitor.metrics import read_metrics

POLL_S = 2.0
FINISH_S = 30.0  # how long the end of a run may wait for uploads

logger = get_logger("wandb")


@contextmanager
def open_wandb_mirror(config: RunConfig | SftConfig) -> Iterator[None]:
    """Mirror metrics for the duration of the context; do nothing without a `[wandb]` table.

    Raises: ConfigError if wandb cannot start. Later failures are logged once and end only the mirror.
    """
    if config.wandb is None:
        yield
        return

    # A thread, because uploads may hang: the run must neither wait for them nor fail with them.
    mirror, closing = _Mirror(config), threading.Event()
    thread = threading.Thread(target=mirror.follow, args=(closing,), name="wandb-mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join(FINISH_S + POLL_S)
        if thread.is_alive():
            logger.warning(
                f"wandb has not finished after {FINISH_S:.0f} s. What it has not sent lies in "
                f"{mirror.bookmark.parent}: send it with `wandb sync`."
            )


class _Mirror:
    """Log each process's row of a step as it comes.

    `step` is an ordinary metric and the x axis of all others, because wandb's own counter rejects values out of order
    (the orchestrator is ahead of the trainer; a resumed run trains steps again).
    """

    def __init__(self, config: RunConfig | SftConfig) -> None:
        self._metrics = config.paths.metrics
        self.bookmark = config.paths.root / "wandb" / "mirror.json"
        """The wandb run of this folder and how far it has been sent, so that a resumed run continues its charts."""
        sent = json.loads(self.bookmark.read_text()) if self.bookmark.exists() else {}
        self._offset: int = sent.get("offset", 0)
        self._run = _init(config, sent.get("run_id"))

    def follow(self, closing: threading.Event) -> None:
        """Log rows as they come, until `closing` is set and all of them are sent."""
        try:
            while not closing.wait(POLL_S):
                self._mirror()
            self._mirror()
            self._run.finish()
        except Exception as error:  # no error of wandb ends training
            logger.warning(
                f"wandb failed: {type(error).__name__}: {error}. Nothing more is sent there; training continues, and "
                f"{self._metrics} has every number."
            )

    def _mirror(self) -> None:
        """Log the rows that came since the last time. A mirror that is killed may log some of them twice."""
        rows, offset = read_metrics(self._metrics, self._offset)
        for row in rows:
            # W&B has its own clock, and cannot draw None, which marks a number that was not finite.
            named = {name: value for name, value in row.items() if name not in ("process", "time_s")}
            self._run.log({name: value for name, value in named.items() if value is not None})

        # Written after the rows were handed over: after a crash some are sent twice, and none is lost.
        if offset != self._offset or not self.bookmark.exists():
            with atomic_write(self.bookmark) as file:
                file.write(json.dumps({"run_id": self._run.id, "offset": offset}).encode())
        self._offset = offset


def _init(config: RunConfig | SftConfig, run_id: str | None) -> Any:
    import wandb  # seconds to import, and only needed here

    assert config.wandb is not None
    config.paths.root.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            project=config.wandb.project,
            entity=config.wandb.entity,
            name=config.wandb.name or config.name,
            group=config.wandb.group,
            tags=config.wandb.tags or None,
            mode=config.wandb.mode,
            id=run_id,
            resume="allow" if config.wandb.mode == "online" else None,
            dir=config.paths.root,
            config=without_secrets(config.model_dump(mode="json")),
            settings=wandb.Settings(console="off", quiet=True, finish_timeout=FINISH_S),
        )
    except (wandb.errors.Error, OSError, TimeoutError) as error:
        reason = str(error).rstrip(".")
        raise ConfigError(
            f"wandb could not start for project {config.wandb.project!r} (mode {config.wandb.mode}): {reason}. "
            "Type `wandb login`, write to disk only with `--wandb.mode offline`, or leave it out by `--wandb none`."
        ) from error

    # Use our step as the x axis of all charts.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run
