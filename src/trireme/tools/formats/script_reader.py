"""Read a script of TRL's trainers as a table of TRL's keys."""

from __future__ import annotations

import ast
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from trireme.base.errors import ConfigError
from trireme.tools.formats.row_rules import Table
from trireme.tools.formats.script_slice import Slice
from trireme.tools.formats.script_values import DEFINITIONS, Parsed, Program, Unreadable, name_of
from trireme.tools.formats.trl import TRL_GRPO, TRL_SFT

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
PEFT_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": None}
"""Defaults of `LoraConfig`, which differ from those of TRL's `ModelConfig`."""

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
"""Parameters of the trainers that are not supported, and what comes nearest."""


@dataclass
class Script:
    """A script as far as it was read.

    Attributes:
        table: its keys of TRL, without defaults.
        given: those that were typed on top.
        unread: why keys or parameters could not be read, with their lines.
        parameters: expressions of the trainer's arguments.
        slice: the part of the script that data and rewards need.
        weights: of the reward functions; None for 1 each.
        notes: what is left out.
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

    reader = Reader(program, given, unread)
    table = reader.configuration(parameters.get("args")) | reader.model(parameters.get("model"))
    table |= reader.adapters(parameters.get("peft_config")) | reader.tokenizer(parameters.get("processing_class"))
    frozen = reader.frozen | dict.fromkeys(reader.config_names, table)
    script = Script(program, kind, table, given, unread, parameters, Slice(program, call, frozen))
    for name, value in parameters.items():
        if name in INSTEAD and not is_none(value) and "get_quantization_config" not in ast.unparse(value):
            unread.append(f"line {value.lineno}: `{name}` is not supported - expected {INSTEAD[name]}. Remove it.")
        elif name in HARMLESS:
            script.notes.append(f"line {value.lineno}: `{name}` is left out")
    script.weights = (given.get("reward_weights") or table.get("reward_weights")) if kind == "grpo" else None
    return script


def _other_trainers(program: Program) -> list[str]:
    nodes = (node for node in ast.walk(program.tree) if isinstance(node, ast.Call))
    return [name for node in nodes if (name := name_of(node.func).rpartition(".")[2]).endswith("Trainer")]


@dataclass
class Reader:
    """Reads the arguments of a trainer as keys of TRL."""

    program: Program
    given: Table
    unread: list[str]
    config_names: set[str] = field(default_factory=set)

    @property
    def frozen(self) -> dict[str, dict[str, Any]]:
        """The values that the parser of the command line returned, by the names that the script gave them."""
        stored = (
            node.id
            for statement in [*self.program.module, *self.program.function]
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        found = {}
        for name in dict.fromkeys([*stored, *self.program.parameters]):
            with suppress(Unreadable):
                if isinstance(value := self.program.value(ast.Name(name, ast.Load())), Parsed):
                    found[name] = value.values
        return found

    def read(self, key: str, node: ast.AST) -> Table:
        """Return the value of a key; nothing, and its reason, if it cannot be read."""
        try:
            return {key: self.program.value(node)}
        except Unreadable as error:
            if key in HARMLESS_KEYS:
                return {key: ast.unparse(node)}
            if key not in self.given:
                whole = f"`{key} = {ast.unparse(node)[:60]}`".replace("** = ", "**")
                inner = "" if error.text.strip("`") == ast.unparse(node) else f" {error.text}"
                advice = "one by one" if key == "**" else f"or give `--set {key}=VALUE`"
                self.unread.append(f"line {getattr(node, 'lineno', '?')}: {whole}:{inner} {error.why}, {advice}")
            return {}

    def keywords(self, call: ast.Call) -> Table:
        """Return the keyword arguments of a call, with those of `**`."""
        table: Table = {}
        for each in call.keywords:
            read = self.read(each.arg or "**", each.value)
            table |= read if each.arg else dict(read.get("**", {}))
        return table

    def configuration(self, node: ast.expr | None) -> Table:
        """Return the keys of `GRPOConfig(...)`, however it was made."""
        if node is None:
            return {}
        made: ast.AST = node
        try:
            while isinstance(made, ast.Name):
                self.config_names.add(made.id)
                made = self.program.binding(made)
            if is_call(made, "Config", "Arguments"):
                table = (self.read("output_dir", made.args[0]) if made.args else {}) | self.keywords(made)
            else:
                parsed = self.program.value(made)
                table = dict(parsed.values) if isinstance(parsed, Parsed) else {}
        except Unreadable as error:
            self.unread.append(str(error))
            return {}

        # `config.beta = 0.1` behind it; inside of an `if`, it is known only when the script runs.
        for statement in [*self.program.module, *self.program.function]:
            for inner in [] if isinstance(statement, DEFINITIONS) else ast.walk(statement):
                match inner:
                    case ast.Attribute(value=ast.Name(id=name), attr=key, ctx=ast.Store()) if name in self.config_names:
                        if isinstance(statement, ast.Assign) and statement.targets == [inner]:
                            table |= self.read(key, statement.value)
                        elif key not in self.given and key not in HARMLESS_KEYS:
                            where = f"line {inner.lineno}: `{name}.{key}` is set inside of another statement"
                            self.unread.append(f"{where}; set it once, or give `--set {key}=VALUE`")
        return table

    def model(self, node: ast.expr | None) -> Table:
        """Return the model's name, and the arguments of `from_pretrained`."""
        made = self.resolved(node)
        if is_call(made, "from_pretrained") and made.args:
            kwargs = self.keywords(made)
            return self.read("model_name_or_path", made.args[0]) | ({"model_init_kwargs": kwargs} if kwargs else {})
        return self.read("model_name_or_path", node) if node is not None else {}

    def tokenizer(self, node: ast.expr | None) -> Table:
        made = self.resolved(node)
        if is_call(made, "from_pretrained") and made.args:
            return self.read("processing_class", made.args[0])
        return {} if node is None or made is None else self.read("processing_class", node)

    def adapters(self, node: ast.expr | None) -> Table:
        made = self.resolved(node)
        if is_call(made, "LoraConfig"):
            table: Table = {"use_peft": True} | PEFT_DEFAULTS
            for each in made.keywords:
                if each.arg in ADAPTERS:
                    table |= self.read(ADAPTERS[each.arg], each.value)
                elif each.arg not in ("bias", "inference_mode"):
                    self.unread.append(
                        f"line {each.value.lineno}: `{each.arg}` of LoraConfig is not supported. Remove it."
                    )
            return table
        if is_call(made, "get_peft_config"):
            typed = next((values for values in self.frozen.values() if "use_peft" in values), {})
            return {key: value for key, value in typed.items() if key.startswith(("lora_", "use_"))}
        if node is not None and not is_none(made):
            self.unread.append(f"line {node.lineno}: peft_config - expected `LoraConfig(...)`. Write it so.")
        return {}

    def resolved(self, node: ast.AST | None) -> ast.AST | None:
        """Return the expression that a name stands for; None if it is not known."""
        try:
            while isinstance(node, ast.Name):
                node = self.program.binding(node)
        except Unreadable:
            return None
        return node


def is_call(node: ast.AST | None, *endings: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and name_of(node.func).endswith(endings)


def is_none(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def number_of_examples(script: Script) -> int | None:
    """Return the rows of a data set that is written in the script; None for another."""
    node = Reader(script.program, {}, []).resolved(script.parameters.get("train_dataset"))
    if not is_call(node, ".from_list", ".from_dict") or not node.args:
        return None
    try:
        rows = script.program.value(node.args[0])
    except Unreadable:
        return None
    return len(next(iter(rows.values()), [])) if isinstance(rows, dict) else len(rows)
