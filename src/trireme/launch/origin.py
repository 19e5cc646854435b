"""Begin a run from another run's checkpoint (`resume_from`): find it, check that it fits, and take it over.

What is taken lies in `origin/` of the new run (`journal/origin.py`), so a run that began is resumed like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.base.paths import RunPaths, step_folder, step_of
from trireme.config.files import read_run, read_table, toml_value
from trireme.config.model.folder import read_config
from trireme.config.problems import raise_together
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.journal.manifest import complete_steps
from trireme.launch.settings import (
    content_at_first,
    content_of_run,
    model_names,
    previous_file,
    table_prefix,
    training,
)

if TYPE_CHECKING:
    from trireme.journal.origin import Origin
    from trireme.journal.records import State

SHAPES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "num_experts", "num_local_experts", "tie_word_embeddings"),
)
"""Keys of a config.json on which the shapes of parameters depend. The trainer compares each tensor later."""
ADAPTERS = ("rank", "alpha", "use_rslora", "target_modules", "modules_to_save")
"""Keys of adapters that must be those of the checkpoint."""


def check_origin(config: RunConfig | SftConfig) -> None:
    """Check that a run which is to begin can begin from `resume_from`. Others always pass.

    Raises: ConfigError if there is no such checkpoint, or it does not fit.
    """
    if _begins_elsewhere(config):
        _describe(config)
    elif config.resume_from is not None and config.resume:
        _check_same(config, config.resume_from)


def _check_same(config: RunConfig | SftConfig, other: Path) -> None:
    """Check that a run that is resumed began from the other run. Raises: ConfigError."""
    from trireme.journal.origin import read_origin

    root, known = config.paths.root, read_origin(config.paths.root)
    if config.paths.holds_run and (known is None or not other.resolve().is_relative_to(known.folder)):
        began = f"from {known.folder}" if known else "from its base model"
        raise ConfigError(
            f"`--resume` with resume_from = {other}, and the run in {root} began {began} - expected the same: what a "
            "run begins from holds once. Leave `resume_from` out to continue it, or `--resume` to begin another run."
        )


def begin(config: RunConfig | SftConfig) -> None:
    """Take the checkpoint of `resume_from` into the folder of a run that begins.

    Raises: ConfigError as `check_origin`, or if the run began from another checkpoint.
    """
    if not _begins_elsewhere(config):
        return
    from trireme.journal.origin import read_origin, write_origin

    origin, checkpoint = _describe(config)
    config.paths.root.mkdir(parents=True, exist_ok=True)
    write_origin(config.paths.root, origin, checkpoint)

    # Trainer and orchestrator may be started alone, at the same time. The first of them has written it.
    known = read_origin(config.paths.root)
    assert known is not None
    if (known.manifest, known.begins_at, known.without) != (origin.manifest, origin.begins_at, origin.without):
        raise ConfigError(
            f"the run in {config.paths.root} began from version {known.version} of {known.folder}{_left_out(known)}, "
            f"and `resume_from` is version {origin.version} of {origin.folder}{_left_out(origin)} - expected the same "
            "for all of its processes. Name the step in all of them, or start in an empty folder."
        )
    print(f"begins from version {origin.version} of {origin.folder}{_left_out(origin)}", flush=True)


def _begins_elsewhere(config: RunConfig | SftConfig) -> bool:
    return config.resume_from is not None and not config.resume and training(config).ckpt.resume_step is None


def _left_out(origin: Origin) -> str:
    return f", without its {', '.join(origin.without)}" if origin.without else ""


def _describe(config: RunConfig | SftConfig) -> tuple[Origin, Path]:
    """Return what the run takes over, and the folder of the checkpoint.

    Raises: ConfigError with all problems.
    """
    from trireme.journal.origin import Origin, digest_of_manifest, read_origin  # with numpy behind it

    root, step = _find_checkpoint(config)
    checkpoint, file = step_folder(RunPaths(root).checkpoints, step), _settings_file(root)
    before = read_table(file)
    raise_together(_problems(config, root, checkpoint, before))
    ckpt = training(config).ckpt
    without = [part for part in ("optimizer", "scheduler", "data", "progress") if part in ckpt.resume_without]
    begins_at = 0 if "progress" in without else step
    if (last := config.max_steps) <= begins_at and not (isinstance(config, SftConfig) and config.num_epochs):
        raise ConfigError(
            f"`resume_from` is the checkpoint of step {step}, and max_steps = {last} - expected more, as steps count "
            f'from the beginning of the other run. Set `max_steps = {step + last}`, or add "progress" to '
            f"`{table_prefix(config)}ckpt.resume_without`."
        )

    # The schedule of the learning rate continues at the other's place, or begins with this run.
    earlier = read_origin(root)
    shift = (earlier.schedule_shift if earlier else 0) + step - begins_at
    takes_data = "data" not in without
    origin = Origin(
        folder=str(root.resolve()),
        version=step,
        begins_at=begins_at,
        manifest=digest_of_manifest(checkpoint),
        without=without,
        schedule_shift=-begins_at if "scheduler" in without else shift,
    )
    if isinstance(config, SftConfig):
        samples = _samples_before(root, file, step, earlier) if takes_data else 0
        return replace(origin, samples=samples), checkpoint
    return replace(origin, state=_state(root, step, origin)), checkpoint


def _find_checkpoint(config: RunConfig | SftConfig) -> tuple[Path, int]:
    """Return the other run's folder, and the step of the checkpoint there. Raises: ConfigError if there is none."""
    other = config.resume_from
    assert other is not None
    step = step_of(other)
    root = other.parent.parent if step is not None and other.parent.name == "checkpoints" else other
    if root is other:
        step = None

    if not root.is_dir():
        nearby = sorted(str(folder) for folder in root.parent.glob("*") if RunPaths(folder).holds_run)[:5]
        advice = f"Runs nearby: {', '.join(nearby)}." if nearby else "Check the path."
        raise ConfigError(f"resume_from = {other} does not exist - expected the folder of a run. {advice}")
    if root.resolve() == config.paths.root.resolve():
        raise ConfigError(
            f"resume_from = {other} is the run's own folder - expected that of another run. Add `--resume` to continue "
            f"the run, `--{table_prefix(config)}ckpt.resume-step N` to go back in it, or give this one a `name`."
        )

    have = complete_steps(RunPaths(root).checkpoints)
    if not have or step not in (None, *have):
        asked = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
        raise ConfigError(
            f"resume_from = {other}: there is no {asked} in {RunPaths(root).checkpoints} - it has {have or 'none'}. "
            "Take one of these, or the folder of a run that has some; weights alone are a base model (`model.name`)."
        )
    return root, have[-1] if step is None else step


def _settings_file(root: Path) -> Path:
    """Return the file of the settings that the other run was started with last. Raises: ConfigError."""
    file = previous_file(RunPaths(root).configs, None) or previous_file(RunPaths(root).configs, "orchestrator")
    if file is None:
        raise ConfigError(
            f"{root} has no `configs/run.json` - expected the folder of a run, which says what its checkpoints hold. "
            "Restore it, or take the weights of that run as `model.name`."
        )
    return file


def _problems(config: RunConfig | SftConfig, root: Path, checkpoint: Path, before: dict[str, Any]) -> Iterator[str]:
    """Yield why the checkpoint does not fit this run."""
    is_of_rl = "orchestrator" in before
    table, prefix = (before.get("trainer", {}) if is_of_rl else before), table_prefix(config)
    without, own = training(config).ckpt.resume_without, training(config)
    yield from _model_problems(config, root, checkpoint, before, is_of_rl=is_of_rl)

    # Adapters are loaded into adapters of the same form, a whole model into a whole model.
    then, now = (table.get("model") or {}).get("lora") or {}, own.model.lora
    if bool(then) != (now is not None):
        has, trains = ("adapters", "the whole model") if then else ("the whole model", "adapters")
        yield (
            f"the run in {root} trains {has}, and this one {trains} (`[{prefix}model.lora]`) - expected the same. "
            f"{'Add' if then else 'Remove'} that table, or begin from exported weights (`model.name`)."
        )
    given = now.model_dump(mode="json") if now is not None else {}
    for key in ADAPTERS if then and given else ():
        one, other = then.get(key), given[key]
        if (sorted(one) if isinstance(one, list) else one) != (sorted(other) if isinstance(other, list) else other):
            yield (
                f"{prefix}model.lora.{key} = {toml_value(other)}, and the run in {root} trains with "
                f"{toml_value(one)} - expected the same, as its adapters are taken over. Set it to that."
            )

    optim = str((table.get("optim") or {}).get("type"))
    if "optimizer" not in without and optim[:5] != own.optim.type[:5]:  # AdamW and its 8-bit form load each other's
        yield (
            f'{prefix}optim.type = "{own.optim.type}", and the checkpoint holds the state of {optim!r} - expected the '
            f'same. Set it to that, or add "optimizer" to `{prefix}ckpt.resume_without`.'
        )

    if "data" in without:
        return
    advice = f'Add "data" to `{prefix}ckpt.resume_without` to begin with the first example.'
    if is_of_rl != isinstance(config, RunConfig):
        yield (
            f"the run in {root} is of {'rl' if is_of_rl else 'sft'}, whose place in the data means nothing here - "
            f"expected one of the same command. {advice}"
        )
    elif isinstance(config, RunConfig):
        names = {str(each.get("name") or each.get("id")) for each in before["orchestrator"].get("env", [])}
        if names != (ours := {each.resolved_name for each in config.orchestrator.env}):
            yield (
                f"the run in {root} has the environments {', '.join(sorted(names))}, and this one "
                f"{', '.join(sorted(ours)) or 'none'} - expected the same, as the order of examples continues. {advice}"
            )


def _model_problems(
    config: RunConfig | SftConfig, root: Path, checkpoint: Path, before: dict[str, Any], *, is_of_rl: bool
) -> Iterator[str]:
    """Yield how the base model differs in what the checkpoint depends on."""
    names = model_names(config.model_dump(mode="json"), table_prefix(config))
    saved, ours = read_config(str(checkpoint / "model")), read_config(names[0])
    for key in SHAPES if saved and ours else ():
        if saved.get(key) != ours.get(key):
            yield (
                f"the checkpoint in {checkpoint} is of a model with {key} = {saved.get(key)}, and {names[0]} has "
                f"{ours.get(key)} - expected the same model. Set `model.name` to "
                f"{model_names(before, 'trainer.' if is_of_rl else '')[0]!r}."
            )
            return

    # Adapters are changes of their base model; tokens mean what the tokenizer says.
    then, now = content_at_first(RunPaths(root)), content_of_run(config)
    parts = (("weights", "adapters") if training(config).model.lora else None, ("tokenizer", "tokens"))
    for part, what in filter(None, parts):
        if part in then.keys() & now.keys() and then[part] != now[part]:
            yield (
                f"the run in {root} began with other {part if part == 'weights' else 'files of the tokenizer'} than "
                f"{names[0 if part == 'weights' else 1]!r} has - expected the same, as its {what} would mean something "
                "else. Set `model.name` to its model."
            )


def _samples_before(root: Path, file: Path, step: int, earlier: Origin | None) -> int:
    """Return the samples that a supervised run took before a step."""
    from trireme.journal.settings import Settings

    config = updated(read_run(SftConfig, file), {"name": None, "output_dir": root})
    eras = Settings(config).eras()
    ends = [*(begin for begin, _ in eras[1:]), step]
    first, taken = (earlier.begins_at, earlier.samples) if earlier else (0, 0)
    sizes = ((max(begin, first), min(end, step), each) for (begin, each), end in zip(eras, ends, strict=True))
    return taken + sum(max(0, end - begin) * each.batch_size for begin, end, each in sizes)


def _state(root: Path, step: int, origin: Origin) -> State:
    """Return what the orchestrator continues from. Raises: ConfigError if the other run's journal does not say it."""
    from trireme.journal.journal import Journal
    from trireme.journal.records import State

    if "data" in origin.without and "progress" in origin.without:
        return State()
    try:
        found = Journal(RunPaths(root).journal).state_before(step)
    except (OSError, JournalCorrupt) as error:
        raise ConfigError(
            f"{Journal(RunPaths(root).journal).path(step - 1)} cannot be read ({error}) - expected the batch that the "
            'checkpoint was made from, which says what comes next. Restore it, or add "data" and "progress" to '
            "`trainer.ckpt.resume_without`."
        ) from error
    counters = {} if "progress" in origin.without else found.counters
    kept = State() if "data" in origin.without else found
    return replace(kept, next_batch=origin.begins_at, counters=counters)
