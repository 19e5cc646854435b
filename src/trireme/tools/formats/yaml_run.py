"""`rl @ FILE.yaml KEY=VALUE ...`: a run in the keys of TRL's `trl grpo`, or of verl, translated and validated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.config.arguments import OVERRIDE, TypedFile, TypedFlag, parse_arguments
from trireme.config.load import Invocation, knows, read_as
from trireme.config.nested import merged
from trireme.config.problems import raise_together
from trireme.config.run import RunConfig
from trireme.config.translation import Line, Settings, Translated, translate_over, with_comments
from trireme.tools.formats import trl, trl_rules, verl
from trireme.tools.formats.row_rules import Table, of
from trireme.tools.formats.translation import Format
from trireme.tools.formats.yaml_file import read_overrides, read_yaml, resolve_interpolations

OF_VERL = {"actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "reward_model", "reward", "data"}
OF_TRL = {"model_name_or_path", "reward_funcs", "num_generations", "per_device_train_batch_size", "dataset_name"}
TRL_ARGS = (
    *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"),
    *("reward_funcs", "reward_weights"),
)
TRL = Format(f"TRL {trl.VERSION}", trl.TRL_GRPO, required=("model_name_or_path", "dataset_name", "reward_funcs"))
VERL = Format(f"verl {verl.VERSION}", verl.VERL, required=("data.train_files", "actor_rollout_ref.model.path"))
TRL_ROWS = Path(__file__).parent / "environments" / "trl_rows.py"


def read_yaml_run(argv: list[str]) -> tuple[RunConfig, Invocation]:
    """Return the run, and the flags of the command itself, with what became of each key.

    Raises: ConfigError with all keys that are not supported or wrong; SystemExit(0) after `--print-config`.
    """
    overrides = [word for word in argv if OVERRIDE.fullmatch(word)]
    arguments = parse_arguments([word for word in argv if word not in overrides])
    files = [each for each in arguments if isinstance(each, TypedFile)]
    if len(files) > 1 or any(file.scope or not file.name.endswith((".yaml", ".yml")) for file in files):
        raise ConfigError(
            f"{', '.join(file.name for file in files)} were given with overrides of Hydra, or as YAML - expected one "
            "YAML file, of verl or of `trl grpo`, which holds the whole run. Leave the others out."
        )
    where = files[0].name if files else "the overrides"
    table = read_yaml(Path(files[0].name)) if files else {}

    # Flags of the command itself, and keys of ours on top of the file.
    flags = [each for each in arguments if isinstance(each, TypedFlag)]
    own = [flag for flag in flags if knows(Invocation, flag, exactly=False)]
    invocation = read_as(Invocation, {}, where="rl", flags=own)
    ours = [flag for flag in flags if flag not in own]

    if overrides or OF_VERL & table.keys():
        made = translate_verl(table, overrides, where)
    elif OF_TRL & table.keys():
        made = translate_trl(table, where)
    else:
        raise ConfigError(
            f"{where} has the keys {', '.join(map(str, table)) or '(none)'} - expected a configuration of verl "
            "(`actor_rollout_ref`, `data`, …) or of `trl grpo` (`model_name_or_path`, `reward_funcs`, …). "
            "Files of Trireme are TOML."
        )
    if "max_steps" not in made.table and not any(flag.path == ("max_steps",) for flag in ours):
        made.problems.append(
            f"{where}: how many steps an epoch has is not known before the data are read - expected a number. Type "
            "`--max-steps N`, or set it in the file."
        )
    raise_together(made.problems)

    invocation._lines = tuple(made.lines)
    with invocation.their_keys_named():
        config = read_as(RunConfig, made.table, where=f"{where}, translated", flags=ours)
    if invocation.print_config:
        print(with_comments(config, made.lines), end="")
        raise SystemExit(0)
    return config, invocation


def translate_verl(table: Table, overrides: list[str], where: str) -> Translated:
    """Translate a configuration of verl: its file, overrides on top, and verl's defaults below."""
    _check_composition(table.get("defaults", []), where)
    table = {key: value for key, value in table.items() if key not in ("defaults", "hydra")}
    given = resolve_interpolations(read_overrides(overrides, table), verl.DEFAULTS, where)
    return _translated(given, verl.DEFAULTS, VERL, where, verl.environment)


def _check_composition(value: Any, where: str) -> None:
    """Refuse a list of Hydra's that takes in files besides verl's own. Raises: ConfigError that names it."""
    for entry in value if isinstance(value, list) else [value]:
        if entry not in ("_self_", "ppo_trainer"):
            raise ConfigError(
                f"{where}: `defaults` takes in {entry} - expected `ppo_trainer` and `_self_` only, as other files are "
                "not looked for. Print the whole configuration with `--cfg job` of verl, and give that file."
            )


def translate_trl(table: Table, where: str) -> Translated:
    """Translate a file of `trl grpo --config`."""
    return _translated(table, trl.defaults_of(table, "grpo"), TRL, where, _trl_rows)


def _trl_rows(table: Table) -> Settings:
    args = {key: table[key] for key in TRL_ARGS if table.get(key) is not None}
    name = str(table["dataset_name"]).rpartition("/")[2]
    return {"id": str(TRL_ROWS), "name": name, "args": args | {"evaluate": trl_rules.evaluates(table)}}


def _translated(
    given: Table, defaults: Table, format: Format, where: str, environment: Callable[[Table], Settings]
) -> Translated:
    for key in format.required:
        if not of(given, key):
            raise ConfigError(
                f"{where} has no {key} - expected it, as {format.system} has no default of use. Add `{key}`."
            )
    made = translate_over(defaults, given, format.rows, where=where, system=format.system)
    made.settings[("max_async_level",)] = 0
    made.settings[("orchestrator", "env", "0")] = environment(merged(defaults, given))
    made.lines.append(Line((format.system,), ..., {("max_async_level",): 0}, "it samples, then trains", where))
    return made
