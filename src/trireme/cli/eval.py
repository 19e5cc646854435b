"""`uv run eval …` for the checkpoints of a run, `trireme eval run|tui …` for one model on one environment.

All three can be typed after either name.
"""

from __future__ import annotations

from trireme.cli.command import run_command
from trireme.config.arguments import HELP, choose_verb

VERBS = {
    "run": "asks one model on one environment",
    "tui": "shows results in the terminal",
    "weights": "evaluates checkpoints, one after the other",
}

MANUAL = f"""\
usage: trireme eval run ENV -m MODEL ...
       trireme eval tui [FOLDER]
       uv run eval --weights-dir FOLDER --env.id ENV ...

{chr(10).join(f"  {name:8} {line}" for name, line in VERBS.items())}

`weights` need not be typed. `eval run --help` has the flags of `run`; those of `weights` follow.
"""


def main() -> None:
    run_command("eval", eval, abruptly=True)


def eval(argv: list[str]) -> int:
    """Return the verb's exit code; of `weights`, 0 if every rollout has a reward.

    Raises: ConfigError if there is no such verb, or for what was typed; TriremeError if the engine went away.
    """
    if not argv or argv[0] in HELP:
        print(MANUAL)
    if not argv:
        return 2

    # The verb `weights` is implied by flags or a file as the first word.
    name, rest = "weights", argv
    if not argv[0].startswith(("-", "@")):
        advice = f"For an environment: `trireme eval run {argv[0]} -m MODEL`."
        name, rest = choose_verb("eval", VERBS, argv, advice), argv[1:]

    # Imports are made per verb: those of checkpoints load torch, which takes seconds.
    if name == "run":
        from trireme.tools.evaluate.run import eval_run

        return eval_run(rest)
    if name == "tui":
        from trireme.tools.viewer.app import command

        return command(rest)

    from trireme.config.load import load_config
    from trireme.tools.evaluate.config import EvalConfig, with_environments

    config, invocation = load_config(with_environments(rest), EvalConfig, program="eval")
    if config.weights_dir is None:
        from trireme.tools.evaluate.run import eval_served

        return eval_served(config, dry_run=invocation.dry_run)
    from trireme.tools.evaluate.checkpoints import evaluate_checkpoints  # with torch behind it

    return evaluate_checkpoints(config, dry_run=invocation.dry_run)


if __name__ == "__main__":
    main()
