"""How fast the dashboard opens a long run: 1,000 steps of 512 rollouts, in a real browser.

    uv run python -m benchmarks.tools.dashboard [--steps 1000] [--rollouts 512] [--times 5]

The run is synthetic and written by our own writers (journal, metrics, spans, configuration, logs), so it has every file
that a real one has, in their sizes. The browser is Chromium without a screen, on the same machine.

"opens" is from the address being asked for until the first curve is drawn. Each view is timed from the click on its tab
until what it is about is to be seen; all of them are opened `--times` times, and medians are shown with the worst. CPU
is of the dashboard's process and of the browser's: unlike seconds, it does not depend on what else the machine does.
"sent" is what came over the page's socket. Frames are those of the browser while the page of metrics is scrolled from
its top to its end, whose charts are drawn meanwhile.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import numpy as np
import psutil
from playwright.sync_api import Page, WebSocket

from benchmarks.measuring import command, print_table
from support.runs.chromium import open_chromium
from support.runs.dashboard_walk import VIEWS, dashboard_of
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.records import BatchRecord, Rollout, State
from trireme.messages import Tokens, build_tokens
from trireme.monitor.lines import LinesFile
from trireme.monitor.metrics import MetricsFile
from trireme.monitor.spans import Span
from trireme.orchestrator.batch_metrics import batch_metrics

BEGAN_S = 1_700_000_000.0
STEP_S = 4.0
GROUP = 16
TEMPLATES = 64  # samples that all rollouts are made of
SHOWN = ("overview", "metrics", "timeline", "rollouts", "logs")
"""Views that are timed; tokens is about one rollout."""

SCROLL = """async () => {
  const gaps = []; let last = performance.now(), y = 0;
  const height = document.documentElement.scrollHeight;
  while (y < height) {
    await new Promise(requestAnimationFrame);
    const now = performance.now(); gaps.push(now - last); last = now;
    y += 60; window.scrollTo(0, y);
  }
  return gaps;
}"""


def main(
    steps: int = 1000,
    rollouts: Annotated[int, "of each step, a multiple of 16"] = 512,
    times: Annotated[int, "that everything is opened"] = 5,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure(write_run_folder(Path(folder), steps=steps, rollouts=rollouts), times)


# the run


def write_run_folder(folder: Path, *, steps: int, rollouts: int) -> Path:
    batches = {"batch_size": rollouts, "rollouts_per_example": GROUP, "env": [{"id": "reverse-text"}]}
    values = {"output_dir": folder, "name": "long", "max_steps": steps, "orchestrator": batches}
    config = RunConfig.model_validate(values)
    write_run(config, config.paths.run_config)
    write_journal(config, steps, rollouts)
    write_spans(config.paths.root / "spans.jsonl", steps)
    write_logs(config, steps)
    return config.paths.root


def write_journal(config: RunConfig, steps: int, num_rollouts: int) -> None:
    """Write the batches, and the metrics of each batch and step as the two processes report them."""
    rng = random.Random(0)
    journal = Journal(config.paths.journal)
    orchestrator, trainer = (MetricsFile(config.paths.metrics, name) for name in ("orchestrator", "trainer"))
    samples = [sample(rng) for _ in range(TEMPLATES)]
    for step in range(steps):
        rollouts = [rollout(rng, rng.choice(samples), step, step * num_rollouts + n) for n in range(num_rollouts)]
        metrics = batch_metrics(step, rollouts, [], config=config, outcomes=[])
        journal.append(BatchRecord(step, rollouts, [], State(next_batch=step + 1), metrics))
        orchestrator.append(step, metrics | {"time/fill_batch": STEP_S, "time/journal": 0.01})
        if step % 50 == 0:
            orchestrator.append(step, {"eval/reverse-text/reward": step / steps, "eval/reverse-text/std": 0.1})
        trainer.append(step, trained(step, steps, rng))


def sample(rng: random.Random) -> Tokens:
    given, sampled = 12, rng.randrange(4, 28)
    return build_tokens(
        ids=[rng.randrange(100) for _ in range(given + sampled)],
        loss_mask=[0] * given + [1] * sampled,
        logprobs=[0.0] * given + [-rng.random() for _ in range(sampled)],
        advantages=[0.0] * given + [rng.random() - 0.5] * sampled,
        versions=[-1] * given + [0] * sampled,
    )


def rollout(rng: random.Random, tokens: Tokens, step: int, number: int) -> Rollout:
    words = "abcdef " * 8
    versions = np.where(tokens.versions < 0, -1, max(0, step - 1)).astype(tokens.versions.dtype)
    return Rollout(
        group=number // GROUP,
        place=number % GROUP,
        attempt=0,
        env="reverse-text",
        example=rng.randrange(10_000),
        reward=round(min(1.0, max(0.0, rng.gauss(0.3 + 0.5 * step / 1000, 0.25))), 3),
        samples=[msgspec.structs.replace(tokens, versions=versions)],
        temperature=1.0,
        metrics={"lcs_reward": 0.5, "exact_match": 0.0, "num_turns": 1.0},
        prompt=[{"role": "user", "content": f"Reverse: {words}"}],
        completion=[{"role": "assistant", "content": words[::-1]}],
        answer=words[::-1],
        stop="stop",
        num_turns=1,
    )


def trained(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    names = ("loss", "grad_norm", "policy/kl", "importance_ratio", "ess", "mismatch_kl", "masked_frac", "capped_frac")
    return {name: rng.gauss(1.0, 0.1) for name in names} | {
        "lr": 1e-5 * (1 - step / steps),
        "policy/entropy": 2.0 - step / steps,
        "perf/tokens_per_s": rng.gauss(25_000, 500),
        "perf/shared_frac": 0.4,
        "perf/peak_memory_gib": 40.0,
        "time/step": rng.gauss(STEP_S, 0.2),
        "time/wait_for_batch": abs(rng.gauss(0.4, 0.1)),
        "time/forward_backward": rng.gauss(3.0, 0.1),
        "time/optimizer": 0.2,
        "time/publish": 0.3,
    }


def write_spans(path: Path, steps: int, num_engines: int = 8) -> None:
    lines = LinesFile(path)
    for step in range(steps):
        at = BEGAN_S + STEP_S * step
        spans = [Span("trainer", "wait", at, 0.4, step, "no batch yet"), Span("trainer", "train", at + 0.4, 3.2, step)]
        spans += [Span("trainer", "transfer", at + 3.6, 0.3, step), Span("orchestrator", "journal", at, 0.01, step)]
        for number in range(num_engines):
            lane = f"engine 10.0.0.{number}:8000"
            spans += [Span(lane, "generate", at, 3.4, step), Span(lane, "transfer", at + 3.6, 0.3)]
            spans += [Span(lane, "wait", at + 3.4, 0.2, -1, "max_async_level 1: the trainer is at a batch")]
        for span in spans:
            lines.put(msgspec.json.encode(span))
        lines.flush()
    lines.close()


def write_logs(config: RunConfig, steps: int) -> None:
    config.paths.logs.mkdir(parents=True, exist_ok=True)
    for process in ("orchestrator", "trainer", "inference"):
        lines = (
            f"12:00:00 INFO    {process} | step {step} line {line}\n" for step in range(steps) for line in range(20)
        )
        config.paths.log(process).write_text("".join(lines))


# what is measured


class Meter:
    """CPU of the dashboard's process and of the browser's, and what the socket brought."""

    def __init__(self, page: Page, process: psutil.Process) -> None:
        self.bytes = 0
        self._process = process
        page.on("websocket", self._listen)

    def _listen(self, socket: WebSocket) -> None:
        socket.on("framereceived", self._count)

    def _count(self, frame: str | bytes) -> None:
        self.bytes += len(frame)

    def cpu_s(self) -> tuple[float, float]:
        browser = [child for child in psutil.Process().children(recursive=True) if "chrom" in child.name()]
        return _cpu_s(self._process), sum(map(_cpu_s, browser))


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


@contextmanager
def measured(meter: Meter, into: list[dict[str, float]]) -> Iterator[None]:
    wall, cpu, sent = time.perf_counter(), meter.cpu_s(), meter.bytes
    yield
    seconds, now = time.perf_counter() - wall, meter.cpu_s()
    used = {"cpu_s": now[0] - cpu[0], "browser_s": now[1] - cpu[1]}
    into.append({"seconds": seconds, "kib": (meter.bytes - sent) / 1024} | used)


def measure(run: Path, times: int) -> None:
    """Open everything so many times, and print medians and worst."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ("opens", *SHOWN)}
    gaps: list[float] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache, dashboard_of([run], Path(cache)) as address:
        print(f"the address is printed after {time.perf_counter() - began:.2f} s")
        (process,) = [child for child in psutil.Process().children() if "dashboard" in child.cmdline()]
        for _ in range(times):
            with open_chromium() as watched:
                page, meter = watched.page, Meter(watched.page, process)
                with measured(meter, found["opens"]):
                    page.goto(address)
                    page.locator(".tr-main canvas").first.wait_for()
                for name in SHOWN:
                    with measured(meter, found[name]):
                        VIEWS[name](page)
                VIEWS["metrics"](page)
                gaps += page.evaluate(SCROLL)
                assert not watched.troubles, watched.troubles
        print(f"{process.memory_info().rss / 2**20:.0f} MiB at the end\n")
    columns = ("view", "s", "worst, s", "CPU s, dashboard", "CPU s, browser", "sent, KiB")
    print_table(columns, ([name, *row_of(values)] for name, values in found.items()))
    p50, p95, worst = (np.percentile(gaps, share) for share in (50, 95, 100))
    print(f"\nframes while scrolling: median {p50:.0f} ms, p95 {p95:.0f}, worst {worst:.0f}")


def row_of(values: list[dict[str, float]]) -> list[str]:
    medians = {name: median(value[name] for value in values) for name in values[0]}
    seconds = (medians["seconds"], max(value["seconds"] for value in values))
    cells = [f"{each:.2f}" for each in (*seconds, medians["cpu_s"], medians["browser_s"])]
    return [*cells, f"{medians['kib']:.0f}"]


if __name__ == "__main__":
    command(main)
