"""Checks before a run is resumed with a configuration, and going back to an earlier step.

Which key may change, and from when on, is in `config/resume.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, set_aside_after
from trireme.config.files import ProcessName, read_table
from trireme.config.model.content import content_of
from trireme.config.resume import ABSENT, Change
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.journal.manifest import complete_steps
from trireme.launch.settings import (
    Progress,
    changes_since,
    content_at_first,
    content_of_run,
    in_words,
    model_names,
    previous_file,
    progress_of,
    table_prefix,
    training,
)


def check_resume(config: RunConfig | SftConfig, process: ProcessName | None = None) -> None:
    """Check that the run in the folder can be resumed with this configuration. A run that starts fresh always passes.

    Args:
        process: one that starts alone, whose configuration lacks the tables of the others.

    Raises: ConfigError if a key has changed that may not, the base model is another one, or the run has gone beyond
        `max_steps`.
    """
    paths, prefix = config.paths, table_prefix(config)
    step = training(config).ckpt.resume_step  # checkpoint to resume from, if one was asked for
    if not (config.resume or step is not None) or not paths.holds_run:
        return

    progress, last = progress_of(config), _last_step(config)
    file = previous_file(paths.configs, process) or previous_file(paths.configs, "orchestrator")
    if file is not None and not progress.is_empty:
        before = read_table(file)
        _check_model(config, before)
        _check_settings(config, before, progress, process)

    # A smaller `max_steps` would leave steps that are trained already beyond the end of the run.
    if step in (None, -1) and last is not None and progress.steps > last:
        why = "engines serve what they confirmed" if prefix else "these are trained"
        raise ConfigError(
            f"the run in {paths.root} has reached step {progress.steps}, but `max_steps` is {last} - expected "
            f"{progress.steps} or more, as {why}. Raise `max_steps`, or go back with `--{prefix}ckpt.resume-step N`."
        )


def _check_model(config: RunConfig | SftConfig, before: dict[str, Any]) -> None:
    """Compare the model's content with that of the beginning: a folder may be moved, or have another's name."""
    root, key, prefix = config.paths.root, "model.name", table_prefix(config)
    (old, tokenizer), new = model_names(before, prefix), model_names(config.model_dump(mode="json"), prefix)
    if not old or not new[0]:
        return

    # Compare digests of the files, not names: the same folder may hold another model by now.
    now, then = content_of_run(config), content_at_first(config.paths)
    if not then and Path(old).exists():  # a run of an earlier version
        then = content_of(old, tokenizer, from_scratch=training(config).model.from_scratch)

    # Compare what both sides know: a digest is missing if its file was not on the disk.
    in_both = then.keys() & now.keys()
    others = [part for part in ("weights", "config.json") if part in in_both and then[part] != now[part]]
    is_compared = ("config.json" if training(config).model.from_scratch else "weights") in in_both

    # Without a common digest the last part of the name must do.
    if others or not (is_compared or Path(old).name == Path(new[0]).name):
        what = f"whose {' and '.join(others)} are others" if others else "which cannot be compared with it"
        raise ConfigError(
            f"the run in {root} trains the model {old!r}, but `{key}` is {new[0]!r}, {what} - expected the same: what "
            f"was trained so far belongs to that model. Set `{key}` to it, wherever it is now, or start a new run from "
            "the other model: `--name another`, without `--resume`."
        )

    if "tokenizer" in in_both and then["tokenizer"] != now["tokenizer"]:
        raise ConfigError(
            f"the run in {root} began with another tokenizer than {new[1]!r} has now - expected the same, as its "
            f"tokens would mean something else. Set `{prefix}tokenizer.name` to the one that it began with, "
            "or start a new run: `--name another`, without `--resume`."
        )


def _check_settings(
    config: RunConfig | SftConfig, before: dict[str, Any], progress: Progress, process: ProcessName | None
) -> None:
    """Check each changed key.

    Raises: ConfigError if keys have changed that may not; it names all of them with both values.
    """
    root, prefix = config.paths.root, table_prefix(config)
    if process in (None, "trainer"):
        _check_adapters(config, before)

    # Ask for each changed key from when on its new value may hold.
    found = changes_since(before, config, process)
    known = [each for each in found if each.before is not ABSENT]  # an earlier version may lack the key
    repeats = progress.steps > progress.saved
    new_start = "start a new run: `--name another`, without `--resume`"
    if fixed := [each for each in known if each.when == "fixed" and _as_set(each.before) != _as_set(each.now)]:
        raise ConfigError(
            f"the run in {root} cannot be resumed with {_listed(fixed)} - expected {_kept(fixed)}: what it has trained "
            f"so far would become something else. Leave it as it was, or {new_start}."
        )

    optim = next((each for each in known if each.key == f"{prefix}optim.type"), None)
    # AdamW and its 8-bit form read each other's moments. The base model has no optimizer state.
    if optim and progress.steps and str(optim.before)[:5] != str(optim.now)[:5]:
        raise ConfigError(
            f"the run in {root} uses the optimizer {optim.before!r}, but `{prefix}optim.type` is {optim.now!r} - "
            "expected the same ('adamw' and 'adamw_8bit' may replace each other), because its checkpoint holds that "
            "optimizer's state. Leave it as it was, or start a new run from the weights of this one: `model.name`, "
            "without `--resume`."
        )

    # Steps after the checkpoint are repeated and must give the same bits, so the model is built as it was.
    if repeats and (late := [each for each in known if each.when == "checkpoint"]):
        raise ConfigError(
            f"the run in {root} cannot be resumed with {_listed(late)} now: its newest checkpoint is of step "
            f"{progress.saved}, and steps {progress.saved} to {progress.steps - 1} are to be repeated as they were - "
            f"expected {_kept(late)} up to a checkpoint. Resume it as it was (`--max-steps {progress.steps}` ends with "
            f"a checkpoint), or go back: `--{prefix}ckpt.resume-step {progress.saved}`."
        )

    if isinstance(config, RunConfig) and progress.batches and process in (None, "orchestrator"):
        _check_environments(config, before)


def _check_adapters(config: RunConfig | SftConfig, before: dict[str, Any]) -> None:
    """Refuse adapters if the whole model was trained, and the other way round."""
    table = f"{table_prefix(config)}model.lora"
    model = (before.get("trainer", {}) if isinstance(config, RunConfig) else before).get("model") or {}
    old, new = model.get("lora"), training(config).model.lora
    if old and new is None:
        given = " ".join(f"--{table}.{key.replace('_', '-')} {old[key]}" for key in ("rank", "alpha") if key in old)
        raise ConfigError(
            f"the run in {config.paths.root} trains adapters (`{table}.rank = {old.get('rank')}`), its checkpoints "
            f"hold these only, and there is no `[{table}]` now - expected the table as it was. Add it ({given}, ...), "
            "or train the whole model in a new run, from an export: `trireme export --merge`."
        )

    # A checkpoint holds either adapters or the whole model, and neither can be loaded as the other.
    if not old and new is not None and "lora" in model:
        raise ConfigError(
            f"the run in {config.paths.root} trains the whole model, which its checkpoints hold, and there is a table "
            f"`[{table}]` now - expected none. Remove it, or train adapters in a new run, with this one's weights as "
            "`model.name`."
        )


def _check_environments(config: RunConfig, before: dict[str, Any]) -> None:
    names = [str(each.get("name") or each.get("id")) for each in before.get("orchestrator", {}).get("env", [])]
    now = [each.resolved_name for each in config.orchestrator.env]
    if names and set(names) != set(now):
        gone, new = sorted(set(names) - set(now)), sorted(set(now) - set(names))
        what = " and ".join(text for text, some in ((f"without {gone}", gone), (f"with {new}", new)) if some)
        raise ConfigError(
            f"the run in {config.paths.root} cannot be resumed {what} in `orchestrator.env` - expected "
            f"{sorted(set(names))}, as the order of the examples continues by position. Restore them (with the same "
            "`name`), or start a new run: `--name another`, without `--resume`."
        )


def _as_set(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _listed(found: list[Change]) -> str:
    return ", ".join(f"`{each.key}` = {in_words(each.now)}" for each in found)


def _kept(found: list[Change]) -> str:
    return ", ".join(in_words(each.before) for each in found) + ", as it was"


def check_fresh(config: RunConfig, process: Literal["orchestrator", "trainer"]) -> None:
    """Check a process that starts alone: only a launcher moves the files of an earlier run aside.

    Raises: ConfigError if the folder holds such files of this process, and the user did not ask to resume.
    """
    from trireme.journal.journal import Journal  # it imports numpy, which `rl --help` does not wait for

    paths = config.paths
    if config.resume or config.trainer.ckpt.resume_step is not None:
        return
    if process == "orchestrator":
        steps = Journal(paths.journal).steps()
        found = f"{paths.journal} holds {len(steps)} batches"
    else:
        steps = complete_steps(paths.checkpoints)
        found = f"{paths.checkpoints} holds the checkpoints of steps {', '.join(map(str, steps))}"
    if steps:
        raise ConfigError(
            f"{found} of an earlier run - an empty folder was expected. Add --resume to continue that run, or set "
            "another `output_dir` or `name`."
        )


def is_trained(config: RunConfig | SftConfig) -> bool:
    """Return whether the last step is in a checkpoint, and the user does not ask to go back."""
    is_last = complete_steps(config.paths.checkpoints)[-1:] == [_last_step(config)]
    return is_last and training(config).ckpt.resume_step in (None, -1)


def _last_step(config: RunConfig | SftConfig) -> int | None:
    """Return `max_steps`; None if the number of steps follows from the data."""
    return None if isinstance(config, SftConfig) and config.num_epochs is not None else config.max_steps


def rewind(paths: RunPaths, version: int) -> None:
    """Go back to the state right after `version` was trained; 0 is the base model. Later files are moved, not deleted.

    It can be repeated after an interruption. The batches, from which everything else can be made again, are moved last:
    until then a resume without rewinding continues the old run.
    """
    from trireme.journal.journal import Journal  # they import numpy, which `rl --help` does not wait for
    from trireme.journal.versions import Versions

    # This order lets an interrupted rewind be repeated: batches come last, as all else follows from them.
    set_aside_after(paths.checkpoints, version)
    Versions(paths.journal).rewind(version)
    set_aside_after(paths.weights, version)
    set_aside_after(paths.evals, version)
    Journal(paths.journal).rewind(version)
