"""`trireme from-trl`: turn a script with `GRPOTrainer(...)` or `SFTTrainer(...)` into a run. Nothing of it is run.

It writes a configuration, and next to it a file with the script's own data preparation and reward functions.
"""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Iterator
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.paths import atomic_write
from trireme.config.arguments import count, positive_int
from trireme.config.files import to_toml
from trireme.config.load import read_as
from trireme.config.problems import raise_together
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.translation import DEFAULT, Line, Translated, their_keys_named, translate_over
from trireme.tools.formats.row_rules import Table
from trireme.tools.formats.script_reader import Script, number_of_examples, read_script
from trireme.tools.formats.trl import TRL_GRPO, TRL_SFT, VERSION, defaults_of
from trireme.tools.formats.trl_rules import evaluates
from trireme.tools.formats.yaml_file import load

ONLY_THERE = ("completion_ids", "trainer_state", "environments")
"""Arguments that TRL gives reward functions, and that no rollout has here."""
OF_TOKENS = {
    "get_soft_overlong_punishment": "[orchestrator.length_penalty]",
    "get_repetition_penalty_reward": 'orchestrator.filters.repetition = "drop"',
}

FRAME = {
    "grpo": """\
\"\"\"Data and reward functions of {script}, carried over by `trireme from-trl`. It is yours to edit.\"\"\"

from trireme_worker.trl_rewards import as_environment

{carried}


def load_environment():
    return as_environment(
        train={train},
        eval={eval},
        rewards={rewards},
        weights={weights},
    )
""",
    "sft": """\
\"\"\"Data of {script}, carried over by `trireme from-trl`. It is yours to edit.\"\"\"

{carried}


def conversations():
    return [
        {{"prompt": "", "completion": row[{text!r}]}} if {text!r} in row else dict(row)
        for row in {train}
    ]
""",
}


def command(argv: list[str]) -> int:
    """Read a script, print what became of each key, and write the run. Raises: ConfigError."""
    place = argv.index("--") if "--" in argv else len(argv)
    own, words = argv[:place], argv[place + 1 :]
    parser = argparse.ArgumentParser(prog="trireme from-trl", description=__doc__)
    parser.add_argument("script", type=Path, help="the script; its own arguments come behind `--`")
    parser.add_argument("--out", type=Path, help="folder that is written; the script's name if not given")
    parser.add_argument("--num-processes", type=positive_int, default=1, help="of `accelerate launch`")
    parser.add_argument("--num-examples", type=count, help="rows of the data set, for the steps of an epoch")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key that cannot be read")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier call wrote")
    typed = parser.parse_args(own)

    # All problems are shown behind the table, and nothing is written then.
    script = read_script(typed.script, words, _given(typed))
    made, problems = translate_script(script)
    print_table(made.lines)
    raise_together(problems)
    folder = typed.out or Path(typed.script.stem)
    files = write_files(script, made, folder, overwrite=typed.overwrite)

    # What remains to be done or known.
    if missing := script.slice.missing:
        print(f"\n{files[1]} imports {', '.join(missing)}, not installed here: uv pip install {' '.join(missing)}")
    for note in script.notes:
        print(note)
    if script.kind == "grpo":
        print("a prompt that is a text becomes a user's message; TRL continues it as it is")
    print(f"\nwrote {files[0]} and {files[1]}\n  uv run {'rl' if script.kind == 'grpo' else 'sft'} @ {files[0]}")
    return 0


def _given(typed: argparse.Namespace) -> Table:
    given: Table = {}
    for word in typed.set:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"`--set {word}` - expected KEY=VALUE, such as learning_rate=1e-5. Correct it.")
        given[name] = load(value)
    if typed.num_examples is not None:
        given["num_examples"] = typed.num_examples
    return given | {"num_processes": typed.num_processes}


def translate_script(script: Script) -> tuple[Translated, list[str]]:
    """Return the run in our keys, and all that cannot be read or is not supported."""
    table = script.table | script.given
    has_evaluation = script.kind == "grpo" and evaluates(table)
    carried = ("train_dataset", "reward_funcs", *(["eval_dataset"] if has_evaluation else []))
    script.slice.add(*map(script.parameters.get, carried))
    if (examples := number_of_examples(script)) is not None:
        table = {"num_examples": examples} | table
    rows, defaults = TRL_GRPO if script.kind == "grpo" else TRL_SFT, defaults_of(table, script.kind)
    made = translate_over(defaults, table, rows, where=script.where, system=f"TRL {VERSION}")
    problems = [f"{script.where}, {each}" for each in script.unread]
    return made, [*problems, *made.problems, *_problems(script, made)]


def _problems(script: Script, made: Translated) -> Iterator[str]:
    wanted = ("model", "train_dataset", *(["reward_funcs"] if script.kind == "grpo" else []))
    for name in wanted:
        if name not in script.parameters:
            yield f"{script.where}: the trainer has no `{name}` - expected one. Add it."
    if script.kind == "grpo" and ("max_steps",) not in made.settings:
        yield (
            f"{script.where}: the steps of num_train_epochs depend on the number of examples, which is known only when "
            "the script runs - expected a number. Give `--num-examples N`, or `--set max_steps=N`."
        )
    for name in script.slice.undefined:
        yield f"{script.where}: the data or a reward needs `{name}`, which is not defined. Define it in the script."
    yield from _reward_problems(script)


def _reward_problems(script: Script) -> Iterator[str]:
    """Yield reward functions that ask for what only TRL's trainer has."""
    rewards = script.parameters.get("reward_funcs")
    for node in ast.walk(rewards) if rewards else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield f"line {node.lineno}: {node.value!r} is a reward model - serve it, and ask it in a reward function."
        name = node.id if isinstance(node, ast.Name) else ""
        if name in OF_TOKENS:
            yield f"line {getattr(node, 'lineno', '?')}: `{name}` counts tokens - remove it, and set {OF_TOKENS[name]}."
        for each in script.program.module + script.program.function:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name:
                given = each.args.args[: len(each.args.args) - len(each.args.defaults)]
                for asked in (one.arg for one in given if one.arg in ONLY_THERE):
                    yield f"line {each.lineno}: `{name}` asks for `{asked}`, which only TRL has. Write it without."


def write_files(script: Script, made: Translated, folder: Path, *, overwrite: bool) -> tuple[Path, Path]:
    """Write the configuration and the program next to it, and return their paths. Raises: ConfigError."""
    file = folder / ("rl.toml" if script.kind == "grpo" else "sft.toml")
    program = folder / ("environment.py" if script.kind == "grpo" else "data.py")
    if there := [str(each) for each in (file, program) if each.exists() and not overwrite]:
        raise ConfigError(
            f"{' and '.join(there)} exists, and may have been edited - expected a new folder. Give another one with "
            "`--out`, or add `--overwrite`."
        )

    settings = dict(made.settings)
    settings.setdefault(("name",), script.program.path.stem)
    tokenizer = script.table.get("processing_class")
    if tokenizer and tokenizer != script.table.get("model_name_or_path"):
        settings[("trainer", "tokenizer", "name")] = tokenizer
    root: type[RunConfig] | type[SftConfig] = RunConfig if script.kind == "grpo" else SftConfig
    if script.kind == "grpo":
        settings |= {
            ("max_async_level",): 0,
            ("orchestrator", "env", "0"): {"id": str(program), "name": script.program.path.stem},
        }
    else:
        settings = {path[1:] if path[0] == "trainer" else path: value for path, value in settings.items()}
        settings[("data",)] = str(program)
    table = Translated(settings=settings).table

    # The configuration is read once before it is written, so that errors name TRL's keys.
    with their_keys_named(made.lines):
        read_as(root, table, where=f"{script.where}, translated")
    comments = "".join(f"# {text}\n" for line in made.lines if line.has_effect for text in str(line).splitlines())
    head = f"# {script.where}, a script of TRL {VERSION}, translated by `trireme from-trl`:\n"
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in ((file, f"{head}{comments}\n{to_toml(table)}"), (program, program_text(script, folder))):
        with atomic_write(path) as out:
            out.write(text.encode())
    return file, program


def program_text(script: Script, folder: Path) -> str:
    """Return the file with the script's data preparation and reward functions."""
    source = os.path.relpath(script.program.path.resolve().parent, folder.resolve())
    parts = {name: ast.unparse(node) for name, node in script.parameters.items()}
    carried = script.slice.text()
    text = FRAME[script.kind].format(
        script=script.program.path.name,
        carried=carried,
        train=parts["train_dataset"],
        eval=parts.get("eval_dataset", "None") if evaluates(script.table | script.given) else "None",
        rewards=parts.get("reward_funcs"),
        weights=script.weights,
        text=script.table.get("dataset_text_field", "text"),
    )
    if script.slice.neighbours:
        place = f"import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path(__file__).parent / {source!r}))\n"
        text = text.replace(carried, place + carried, 1)
    return text


def print_table(lines: list[Line]) -> None:
    """Print what became of each key: first those that were given and have an effect, then defaults, then the others."""
    for line in sorted(lines, key=lambda line: (not line.has_effect, line.note.startswith(DEFAULT))):
        print(line)
    print(flush=True)
