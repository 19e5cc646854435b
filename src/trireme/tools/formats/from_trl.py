"""`trireme from-trl`: turn a script with `GRPOTrainer(...)` or `SFTTrainer(...)` into a run. Nothing of it is run.

It writes a configuration, and next to it a file with the script's own data preparation and reward functions.
"""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.base.paths import atomic_write
from trireme.config.arguments import count, positive_int
from trireme.config.files import to_toml
from trireme.config.load import read_as
from trireme.config.problems import raise_together
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.translation import Line, Translated, their_keys_named, translate
from trireme.tools.formats.script_slice import Slice
from trireme.tools.formats.script_values import Parsed, Program, Unreadable, name_of
from trireme.tools.formats.trl import TRL_GRPO, TRL_SFT, VERSION, Table, with_defaults
from trireme.tools.formats.yaml_file import load
from trireme.tools.formats.yaml_run import DEFAULT, mark_defaults

TRAINERS = {"GRPOTrainer": "grpo", "SFTTrainer": "sft"}
POSITIONAL = {
    "grpo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "sft": ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
}
ADAPTERS = {
    **{"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora"},
    **{"target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save", "use_dora": "use_dora"},
    "task_type": "lora_task_type",
}
PEFT_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Of `LoraConfig`, which differ from those of TRL's `ModelConfig`."""

HARMLESS = ("callbacks", "reward_processing_classes", "compute_metrics", "preprocess_logits_for_metrics")
READ_BY_OTHERS = (
    *("generation_batch_size", "steps_per_generation", "eval_steps", "num_generations_eval", "eval_on_start"),
    *("use_bias_correction_kl", "ref_model_sync_steps", "ref_model_mixup_alpha", "reward_weights", "num_examples"),
    *("vllm_importance_sampling_mode", "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
    *("vllm_importance_sampling_clip_min", "max_prompt_length", "dataset_text_field", "num_processes"),
)
"""Keys that have no effect of their own, and that rules of other keys look at."""
HARMLESS_KEYS = {row.theirs for row in (*TRL_GRPO, *TRL_SFT) if row.ours is None} - {*READ_BY_OTHERS}
"""Keys whose value need not be known."""
INSTEAD = {
    **{"tools": "an environment with several turns: docs/environments.md", "data_collator": "none: rows are packed"},
    **dict.fromkeys(("rollout_func", "environment_factory"), "an environment with several turns: docs/environments.md"),
    **{"optimizers": "`[trainer.optim]`", "optimizer_cls_and_kwargs": "`[trainer.optim]`"},
    **{"quantization_config": "adapters in bfloat16", "compute_loss_func": 'an own loss: trainer.loss.type = "custom"'},
    "formatting_func": "the dataset's `map` with it",
}
"""Parameters of the trainers that cannot be had, and what comes nearest."""

ONLY_THERE = ("completion_ids", "trainer_state", "environments")
"""What TRL hands to reward functions and no rollout has here."""
OF_TOKENS = {
    "get_soft_overlong_punishment": "[orchestrator.length_penalty]",
    "get_repetition_penalty_reward": 'orchestrator.filters.repetition = "drop"',
}

FRAME = {
    "grpo": """\
\"\"\"Data and reward functions of {script}, carried over by `trireme from-trl`. It is yours to edit.\"\"\"

from trireme_worker.trl_rewards import as_environment
{path}
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
{path}
{carried}


def conversations():
    return [
        {{"prompt": "", "completion": row[{text!r}]}} if {text!r} in row else dict(row)
        for row in {train}
    ]
""",
}


def command(argv: list[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    own, words = argv[:place], argv[place + 1 :]
    parser = argparse.ArgumentParser(prog="trireme from-trl", description=__doc__)
    parser.add_argument("script", type=Path, help="the script; its own arguments come behind `--`")
    parser.add_argument("--out", type=Path, help="folder that is written; the script's name if not given")
    parser.add_argument("--num-processes", type=positive_int, default=1, help="of `accelerate launch`")
    parser.add_argument("--num-examples", type=count, help="rows of the data set, for the steps of an epoch")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key that cannot be read")
    typed = parser.parse_args(own)

    script = read_script(typed.script, words, _given(typed))
    made, problems = translate_script(script)
    print_table(made.lines)
    raise_together(problems)
    folder = typed.out or Path(typed.script.stem)
    files = write_files(script, made, folder)
    missing = script.slice.missing_packages()
    if missing:
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


@dataclass
class Script:
    """A script as far as it was read.

    Attributes:
        table: its keys of TRL, without defaults.
        given: those that were typed on top.
        unread: why keys or parameters could not be read, with their lines.
        rewards: expressions of the reward functions; their weights.
    """

    program: Program
    kind: str
    table: Table
    given: Table
    unread: list[str]
    parameters: dict[str, ast.expr]
    slice: Slice
    weights: Any = None
    notes: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        return str(self.program.path)


def read_script(path: Path, words: list[str], given: Table) -> Script:
    """Read a script. Raises: ConfigError for one without exactly one trainer that is known here."""
    program = Program(path, words)
    calls = program.calls(*TRAINERS)
    if len(calls) != 1:
        others = sorted({name_of(call.func) for call in program.calls(*_other_trainers(program))})
        found = f"lines {', '.join(str(call.lineno) for call in calls)}" if calls else ", ".join(others) or "none"
        raise ConfigError(
            f"{path} has {len(calls)} calls of {' or '.join(TRAINERS)} ({found}) - expected one. "
            f"{'Leave one of them in the script.' if calls else 'Other trainers, and subclasses, are not read.'}"
        )
    call = calls[0]
    kind = TRAINERS[name_of(call.func).rpartition(".")[2]]
    program.look_from(call)
    parameters: dict[str, ast.expr] = dict(zip(POSITIONAL[kind], call.args, strict=False))
    parameters |= {each.arg: each.value for each in call.keywords if each.arg}
    unread = [
        f"line {each.value.lineno}: `**` in a trainer's call; write its parameters"
        for each in call.keywords
        if not each.arg
    ]

    reader = _Reader(program, given, unread)
    table = reader.configuration(parameters.get("args")) | reader.model(parameters.get("model"))
    table |= reader.adapters(parameters.get("peft_config")) | reader.tokenizer(parameters.get("processing_class"))
    frozen = reader.frozen | dict.fromkeys(reader.config_names, table)
    script = Script(program, kind, table, given, unread, parameters, Slice(program, call, frozen))
    for name, value in parameters.items():
        is_none = isinstance(value, ast.Constant) and value.value is None
        if name in INSTEAD and not is_none and "get_quantization_config" not in ast.unparse(value):
            unread.append(f"line {value.lineno}: `{name}` cannot be had - expected {INSTEAD[name]}. Remove it.")
        elif name in HARMLESS:
            script.notes.append(f"line {value.lineno}: `{name}` is left out")
    script.weights = (given.get("reward_weights") or table.get("reward_weights")) if kind == "grpo" else None
    return script


def _other_trainers(program: Program) -> list[str]:
    nodes = (node for node in ast.walk(program.tree) if isinstance(node, ast.Call))
    return [name for node in nodes if (name := name_of(node.func).rpartition(".")[2]).endswith("Trainer")]


@dataclass
class _Reader:
    """Reads the arguments of a trainer as keys of TRL."""

    program: Program
    given: Table
    unread: list[str]
    config_names: set[str] = field(default_factory=set)

    @property
    def frozen(self) -> dict[str, dict[str, Any]]:
        """What the parser of the command line returned, by the names that it was given."""
        found = {}
        for statement in [*self.program.module, *self.program.function]:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    try:
                        value = self.program.value(ast.Name(node.id, ast.Load()))
                    except Unreadable:
                        continue
                    if isinstance(value, Parsed):
                        found[node.id] = value.values
        return found | {
            name: value.values
            for name, node in self.program.parameters.items()
            if isinstance(value := self._quietly(node), Parsed)
        }

    def _quietly(self, node: ast.expr) -> Any:
        try:
            return self.program.value(node)
        except Unreadable:
            return None

    def read(self, key: str, node: ast.AST) -> Table:
        """Return the value of a key; nothing, and its reason, if it cannot be read."""
        try:
            return {key: self.program.value(node)}
        except Unreadable as error:
            if key in HARMLESS_KEYS:
                return {key: ast.unparse(node)}
            if key not in self.given:
                whole = f"`{key} = {ast.unparse(node)[:60]}`"
                inner = "" if error.text.strip("`") == ast.unparse(node) else f" {error.text}"
                line = getattr(node, "lineno", "?")
                self.unread.append(f"line {line}: {whole}:{inner} {error.why}, or give `--set {key}=VALUE`")
            return {}

    def configuration(self, node: ast.expr | None) -> Table:
        """Return the keys of `GRPOConfig(...)`, however it was made."""
        if node is None:
            return {}
        made: ast.AST = node
        names: set[str] = set()
        try:
            while isinstance(made, ast.Name):
                names.add(made.id)
                made = self.program.binding(made)
        except Unreadable as error:
            self.unread.append(str(error))
            return {}
        self.config_names = names

        if isinstance(made, ast.Call) and name_of(made.func).endswith(("Config", "Arguments")):
            table = {
                key: value
                for each, key in zip(made.args, ("output_dir",), strict=False)
                for key, value in self.read(key, each).items()
            }
            for each in made.keywords:
                table |= self.read(each.arg, each.value) if each.arg else self._spread(each.value)
        else:
            try:
                parsed = self.program.value(made)
            except Unreadable as error:
                self.unread.append(str(error))
                return {}
            table = dict(parsed.values) if isinstance(parsed, Parsed) else {}

        # `config.beta = 0.1` behind it
        for statement in [*self.program.module, *self.program.function]:
            match statement:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name), attr=key)]) if name in names:
                    table |= self.read(key, statement.value)
        return table

    def _spread(self, node: ast.expr) -> Table:
        return dict(self.read("**", node).get("**", {}))

    def model(self, node: ast.expr | None) -> Table:
        """Return the model's name, and the arguments of `from_pretrained`."""
        made = self._resolved(node)
        if isinstance(made, ast.Call) and name_of(made.func).endswith("from_pretrained") and made.args:
            kwargs: Table = {}
            for each in made.keywords:
                kwargs |= self.read(each.arg, each.value) if each.arg else self._spread(each.value)
            return self.read("model_name_or_path", made.args[0]) | ({"model_init_kwargs": kwargs} if kwargs else {})
        return self.read("model_name_or_path", node) if node is not None else {}

    def tokenizer(self, node: ast.expr | None) -> Table:
        made = self._resolved(node)
        if isinstance(made, ast.Call) and name_of(made.func).endswith("from_pretrained") and made.args:
            return {"processing_class": self.read("processing_class", made.args[0]).get("processing_class")}
        return {} if node is None or made is None else self.read("processing_class", node)

    def adapters(self, node: ast.expr | None) -> Table:
        made = self._resolved(node)
        if isinstance(made, ast.Call) and name_of(made.func).endswith("LoraConfig"):
            table: Table = {"use_peft": True} | PEFT_DEFAULTS
            for each in made.keywords:
                if each.arg and each.arg in ADAPTERS:
                    table |= self.read(ADAPTERS[each.arg], each.value)
                elif each.arg not in ("bias", "inference_mode"):
                    self.unread.append(
                        f"line {each.value.lineno}: `{each.arg}` of LoraConfig cannot be had. Remove it."
                    )
            return table
        is_of_parser = isinstance(made, ast.Call) and name_of(made.func).endswith("get_peft_config")
        if node is not None and not is_of_parser and not (isinstance(made, ast.Constant) and made.value is None):
            self.unread.append(f"line {node.lineno}: peft_config - expected `LoraConfig(...)`. Write it so.")
        if is_of_parser:
            typed = next((values for values in self.frozen.values() if "use_peft" in values), {})
            return {
                key: value
                for key, value in typed.items()
                if key.startswith(("lora_", "use_peft", "use_rslora", "use_dora"))
            }
        return {}

    def _resolved(self, node: ast.AST | None) -> ast.AST | None:
        try:
            while isinstance(node, ast.Name):
                node = self.program.binding(node)
        except Unreadable:
            return None
        return node


def translate_script(script: Script) -> tuple[Translated, list[str]]:
    """Return the run in our keys, and all that cannot be read or cannot be had."""
    table = script.table | script.given
    if script.kind == "grpo":
        script.slice.add(script.parameters.get("train_dataset"), script.parameters.get("reward_funcs"))
        if table.get("eval_strategy", "no") != "no":
            script.slice.add(script.parameters.get("eval_dataset"))
    else:
        script.slice.add(script.parameters.get("train_dataset"))
    if (examples := number_of_examples(script)) is not None:
        table = {"num_examples": examples} | table
    whole = with_defaults(table, script.kind)

    made = translate(whole, TRL_GRPO if script.kind == "grpo" else TRL_SFT, where=script.where)
    made.lines = mark_defaults(made.lines, table, made.unknown, f"TRL {VERSION}")
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


def number_of_examples(script: Script) -> int | None:
    """Return the rows of a data set that is written in the script; None for another."""
    node = _Reader(script.program, {}, [])._resolved(script.parameters.get("train_dataset"))
    if not (isinstance(node, ast.Call) and name_of(node.func).endswith((".from_list", ".from_dict")) and node.args):
        return None
    try:
        rows = script.program.value(node.args[0])
    except Unreadable:
        return None
    return len(next(iter(rows.values()), [])) if isinstance(rows, dict) else len(rows)


def write_files(script: Script, made: Translated, folder: Path) -> tuple[Path, Path]:
    """Write the configuration and the program next to it, and return their paths. Raises: ConfigError."""
    file = folder / ("rl.toml" if script.kind == "grpo" else "sft.toml")
    program = folder / ("environment.py" if script.kind == "grpo" else "data.py")
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
    beside = os.path.relpath(script.program.path.resolve().parent, folder.resolve())
    parts = {name: ast.unparse(node) for name, node in script.parameters.items()}
    evaluates = (script.table | script.given).get("eval_strategy", "no") != "no"
    carried = script.slice.text()
    text = FRAME[script.kind].format(
        script=script.program.path.name,
        path="",
        carried=carried,
        train=parts["train_dataset"],
        eval=parts.get("eval_dataset", "None") if evaluates else "None",
        rewards=parts.get("reward_funcs"),
        weights=script.weights,
        text=script.table.get("dataset_text_field", "text"),
    )
    if _imports_neighbour(script, carried):
        place = f"import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path(__file__).parent / {beside!r}))\n"
        text = text.replace(carried, place + carried, 1)
    return text


def _imports_neighbour(script: Script, carried: str) -> bool:
    folder = script.program.path.resolve().parent
    nodes = [node for node in ast.walk(ast.parse(carried)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return any((folder / f"{name.partition('.')[0]}.py").exists() for name in names if name)


def print_table(lines: list[Line]) -> None:
    """Print what became of each key: first those that were given and have an effect, then defaults, then the others."""
    for line in sorted(lines, key=lambda line: (not line.has_effect, line.note.startswith(DEFAULT))):
        print(line)
    print(flush=True)
