"""How fast the dashboard opens a long run: 1,000 steps of 512 rollouts, in a real browser.

    uv run python benchmarks/dashboard.py [--steps 1000] [--rollouts 512] [--times 5] [--json FILE] [--keep FOLDER]

The run is synthetic and written by our own writers (journal, metrics, spans, configuration, logs), so it has every file
that a real one has, in their sizes. The browser is Chromium without a screen, on the same machine.

"opens" is from the address being asked for until the first curve is drawn. Each view is timed from the click on its tab
until what it is about is to be seen; all of them are opened `--times` times, and medians are shown with the worst. CPU
is of the dashboard's process and of the browser's: unlike seconds, it does not depend on what else the machine does.
"sent" is what came over the page's socket. Frames are those of the browser while the page of metrics is scrolled from
its top to its end, whose charts are drawn meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from playwright.sync_api import Page, WebSocket

from chromium import open_chromium
from dashboard_walk import VIEWS, dashboard_of
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
TEMPLATES = 64  # rollouts that all others are made of
SHOWN = ("overview", "metrics", "timeline", "rollouts", "logs", "warnings")
"""Views that are timed; tokens and fates are about one rollout, and about an audit that is asked for."""
GOAL_S = 2.0

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


# the run


def write_run_folder(folder: Path, *, steps: int, rollouts: int) -> Path:
    config = RunConfig.model_validate(
        {
            "output_dir": folder,
            "name": "long",
            "max_steps": steps,
            "orchestrator": {"batch_size": rollouts, "rollouts_per_example": GROUP, "env": [{"id": "reverse-text"}]},
        }
    )
    write_run(config, config.paths.run_config)
    write_journal(config, steps, rollouts)
    write_spans(config.paths.root / "spans.jsonl", steps)
    write_logs(config, steps)
    return config.paths.root


def write_journal(config: RunConfig, steps: int, num_rollouts: int) -> None:
    """And the metrics of each batch and step, as the two processes report them."""
    rng = random.Random(0)
    journal = Journal(config.paths.journal)
    orchestrator, trainer = (MetricsFile(config.paths.metrics, name) for name in ("orchestrator", "trainer"))
    templates = [template(rng) for _ in range(TEMPLATES)]
    for step in range(steps):
        rollouts = [one_of(templates, rng, step, number, num_rollouts) for number in range(num_rollouts)]
        metrics = batch_metrics(step, rollouts, [], config=config, outcomes=[])
        journal.append(BatchRecord(step, rollouts, [], State(next_batch=step + 1), metrics))
        orchestrator.append(step, metrics | {"time/fill_batch": STEP_S, "time/journal": 0.01})
        if step % 50 == 0:
            orchestrator.append(step, {"eval/reverse-text/reward": step / steps, "eval/reverse-text/std": 0.1})
        trainer.append(step, trained(step, steps, rng))


def template(rng: random.Random) -> Rollout:
    words = " ".join("".join(rng.choice("abcdefghij") for _ in range(6)) for _ in range(8))
    return Rollout(
        group=0,
        place=0,
        attempt=0,
        env="reverse-text",
        example=0,
        reward=0.0,
        samples=[sample(rng)],
        temperature=1.0,
        metrics={"lcs_reward": 0.5, "exact_match": 0.0, "num_turns": 1.0},
        prompt=[{"role": "user", "content": f"Reverse: {words}"}],
        completion=[{"role": "assistant", "content": words[::-1]}],
        answer=words[::-1],
        stop="stop",
        num_turns=1,
    )


def sample(rng: random.Random) -> Tokens:
    given, said = 12, rng.randrange(4, 28)
    return build_tokens(
        ids=[rng.randrange(100) for _ in range(given + said)],
        loss_mask=[0] * given + [1] * said,
        logprobs=[0.0] * given + [-rng.random() for _ in range(said)],
        advantages=[0.0] * given + [rng.random() - 0.5] * said,
        versions=[-1] * given + [0] * said,
    )


def one_of(templates: list[Rollout], rng: random.Random, step: int, number: int, num_rollouts: int) -> Rollout:
    made = rng.choice(templates)
    versions = np.where(made.samples[0].versions < 0, -1, max(0, step - 1))
    return msgspec.structs.replace(
        made,
        group=(step * num_rollouts + number) // GROUP,
        place=number % GROUP,
        example=rng.randrange(10_000),
        reward=round(min(1.0, max(0.0, rng.gauss(0.3 + 0.5 * step / 1000, 0.25))), 3),
        samples=[msgspec.structs.replace(made.samples[0], versions=versions.astype(made.samples[0].versions.dtype))],
    )


def trained(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    names = ("loss", "grad_norm", "policy/kl", "importance_ratio", "ess", "mismatch_kl", "masked_frac", "capped_frac")
    return {name: rng.gauss(1.0, 0.1) for name in names} | {
        "lr": 1e-5 * (1 - step / steps),
        "policy/entropy": 2.0 - step / steps,
        "perf/tokens_per_s": rng.gauss(25_000, 500),
        "perf/packing_waste": 0.04,
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


def measure(run: Path, times: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {"opens": []} | {name: [] for name in SHOWN}
    gaps: list[float] = []
    with tempfile.TemporaryDirectory() as cache:
        began = time.perf_counter()
        with dashboard_of([run], Path(cache)) as address:
            starts_s = time.perf_counter() - began
            (process,) = [child for child in psutil.Process().children() if "dashboard" in child.cmdline()]
            for _ in range(times):
                with open_chromium() as watched:
                    once(watched.page, address, Meter(watched.page, process), found)
                    gaps += scroll(watched.page)
                    assert not watched.troubles, watched.troubles
            memory = process.memory_info().rss
    return {
        "address is printed after": starts_s,
        "views": {name: summary(values) for name, values in found.items()},
        "frame_ms": {"median": statistics.median(gaps), "p95": float(np.percentile(gaps, 95)), "worst": max(gaps)},
        "memory_mib": memory / 2**20,
        "goal_s": GOAL_S,
    }


def once(page: Page, address: str, meter: Meter, found: dict[str, list[dict[str, float]]]) -> None:
    with measured(meter, found["opens"]):
        page.goto(address)
        page.locator(".tr-main canvas").first.wait_for()
    for name in SHOWN:
        show: Callable[[Page], None] = VIEWS[name]
        with measured(meter, found[name]):
            show(page)


def scroll(page: Page) -> list[float]:
    VIEWS["metrics"](page)
    gaps: list[float] = page.evaluate(SCROLL)
    return gaps


def summary(values: list[dict[str, float]]) -> dict[str, float]:
    seconds = [value["seconds"] for value in values]
    return {
        "median_s": statistics.median(seconds),
        "worst_s": max(seconds),
        **{name: statistics.median(value[name] for value in values) for name in ("cpu_s", "browser_s", "kib")},
    }


def show(result: dict[str, Any]) -> None:
    print(
        f"address is printed after {result['address is printed after']:.2f} s; "
        f"{result['memory_mib']:.0f} MiB at the end"
    )
    print(f"{'':10} {'median s':>9} {'worst s':>9} {'CPU s':>7} {'browser':>8} {'sent KiB':>9}")
    for name, values in result["views"].items():
        row = [values[key] for key in ("median_s", "worst_s", "cpu_s", "browser_s", "kib")]
        print(f"{name:10} {row[0]:9.2f} {row[1]:9.2f} {row[2]:7.2f} {row[3]:8.2f} {row[4]:9.0f}")
    frame = result["frame_ms"]
    print(
        f"frames while scrolling: median {frame['median']:.0f} ms, p95 {frame['p95']:.0f}, worst {frame['worst']:.0f}"
    )
    opens_s = result["views"]["opens"]["median_s"]
    print(f"goal: opens in less than {GOAL_S:g} s: {'yes' if opens_s < GOAL_S else 'no'} ({opens_s:.2f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=512, help="of each step, a multiple of 16")
    parser.add_argument("--times", type=int, default=5, help="that everything is opened")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--keep", type=Path, help="write the run there, or take the one that is there already")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = arguments.keep or Path(temporary)
        run = place / "long"
        if not run.is_dir():
            run = write_run_folder(place, steps=arguments.steps, rollouts=arguments.rollouts)
        result = measure(run, arguments.times)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
