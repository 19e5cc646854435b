"""Drive the viewer of runs and evaluations as its user does: press keys, and read the screen."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any

from textual.events import Key
from textual.keys import _character_to_key
from textual.pilot import Pilot
from textual.worker import WorkerCancelled

from trireme.tools.viewer.app import EvalView

NARROW, WIDE = (80, 24), (140, 40)


def answer(example: int, reward: float | None, said: str = "so be it", **more: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"question {example}"}]
    completion = [{"role": "assistant", "content": said}]
    head = {"example_id": example, "reward": reward, "prompt": prompt, "completion": completion, "answer": "right"}
    return head | {"metrics": {"exact": reward or 0.0}, "rollout": 0, "tokens": 7, "turns": 1, "stop": "done"} | more


def write_results(path: Path, answers: Iterable[dict[str, Any]], *, mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in answers)
    return path


def write_evaluations(run: Path, *, versions: Sequence[int] = (0, 20), examples: int = 4) -> None:
    """Of an environment "say": example 1 gets better, the others stay at example / 10."""
    for version in versions:
        answers = [answer(n, n / 10, f"version {version} says {n}") for n in range(examples)]
        answers[1]["reward"] = version / 20
        write_results(run / "evals" / f"step_{version}" / "say.jsonl", answers)


class Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}


class Viewer:
    def __init__(self, app: EvalView, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    async def press(self, *keys: str) -> str:
        """Press one after the other, each when the effect of another one before is on the screen. Return the screen."""
        for _, same in groupby(keys):  # `Pilot.press` does not wait for workers, and sleeps until the process is idle
            await self.press_at_once(*same)
        return self.screen()

    async def type(self, line: str) -> str:
        return await self.press_at_once(*line, "enter")

    async def press_at_once(self, *keys: str) -> str:
        for key in keys:
            self._post(key)
        await self.settle()
        return self.screen()

    def _post(self, key: str) -> None:
        name = _character_to_key(key) if len(key) == 1 else key
        self.app.post_message(Key(name, key if len(key) == 1 else None))

    async def settle(self) -> None:
        """Wait until no worker looks for files or reads, and the screen stays the same."""
        before = None
        while (now := self.screen()) != before or not all(worker.is_finished for worker in self.app.workers):
            before = now
            with suppress(WorkerCancelled):  # one that was replaced by a newer one
                await self.app.workers.wait_for_complete()
            for _ in range(4):  # messages cause other messages
                await self.pilot.pause(0)

    def screen(self) -> str:
        strips = self.app.screen._compositor.render_strips()  # Textual has no public way
        return "\n".join(strip.text.rstrip() for strip in strips) + "\n"


def view(folder: Path | Sequence[Path], script: Callable[..., Awaitable], *, size: tuple[int, int] = NARROW) -> Any:
    async def main() -> Any:
        app = EvalView([folder] if isinstance(folder, Path) else folder)
        async with app.run_test(size=size, notifications=True) as pilot:
            viewer = Viewer(app, pilot)
            await viewer.settle()
            return await script(viewer)

    return asyncio.run(main())
