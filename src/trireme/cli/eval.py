"""`uv run eval …` for the checkpoints of a run, `trireme eval run|tui …` for one model on one environment.

All three can be typed after either name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from trireme.base.errors import ConfigError
from trireme.cli.door import run_door
from trireme.config.arguments import HELP


@dataclass(frozen=True)
class EvalVerb:
    line: str  # what it does, for the list
    module: str
    function: str

    def run(self, argv: list[str]) -> int:
        door: Callable[[list[str]], int | None] = getattr(import_module(self.module), self.function)
        return door(argv) or 0


VERBS = {
    "run": EvalVerb("asks one model on one environment", "trireme.tools.evaluate.run", "eval_run"),
    "tui": EvalVerb("shows results in the terminal", "trireme.cli.eval_view", "eval_view"),
    "weights": EvalVerb("evaluates checkpoints, one after the other", "trireme.tools.evaluate.weights", "eval_weights"),
}


def main() -> None:
    run_door("eval", eval, abruptly=True)


def eval(argv: list[str]) -> int:
    """Raises: ConfigError where the verb is not one of ours."""
    if not argv:
        print(_manual())
        return 2
    if argv[0] in HELP:
        print(_manual())
        return VERBS["weights"].run(argv)
    if argv[0].startswith(("--", "@")):
        return VERBS["weights"].run(argv)
    name = argv[0]
    if name not in VERBS:
        near = get_close_matches(name, VERBS, n=1)
        raise ConfigError(
            f"there is no `eval {name}` - expected {', '.join(VERBS)}, or flags such as `--weights-dir`. "
            + (
                f"Did you mean `eval {near[0]}`?"
                if near
                else f"For an environment: `trireme eval run {name} -m MODEL`."
            )
        )
    return VERBS[name].run(argv[1:])


def _manual() -> str:
    lines = [f"  {name:8} {verb.line}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: trireme eval run ENV -m MODEL ...",
            "       trireme eval tui [FOLDER]",
            "       uv run eval --weights-dir FOLDER --env.id ENV ...",
            "",
            *lines,
            "",
            "`weights` need not be typed. `eval run --help` has the flags of `run`; those of `weights` follow.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
