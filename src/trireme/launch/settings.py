"""The progress of a run, and the settings that it is started or resumed with: written down, compared and printed."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from trireme.base.paths import RunPaths, atomic_write
from trireme.config.files import PROCESSES, ProcessName, read_table, toml_value, without_secrets, write_run
from trireme.config.model.content import Content, content_of
from trireme.config.resume import ABSENT, Change, changes
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.journal.manifest import complete_steps
from trireme.monitor.metrics import is_of_step, read_metrics

MODEL_FILE = "base_model.json"  # next to the configuration: what the model's folder held when the run began


@dataclass(frozen=True)
class Progress:
    """How far a run has come, once it has gone back to the step that the user asks for."""

    saved: int  # step of the checkpoint from which it resumes
    steps: int  # trained; those after `saved` are repeated
    batches: int  # filled
    is_empty: bool  # nothing is there that depends on settings


def progress_of(config: RunConfig | SftConfig) -> Progress:
    from trireme.journal.origin import first_version  # it imports numpy, which `rl --help` does not wait for

    paths, step = config.paths, training(config).ckpt.resume_step
    first = first_version(paths.root)
    if step is not None and step >= 0:
        return Progress(step, step, step, is_empty=isinstance(config, SftConfig) and step == first)

    saved = max([first, *complete_steps(paths.checkpoints)])
    if isinstance(config, SftConfig):
        from trireme.journal.settings import read_past

        # Rows before the last return to an earlier step are of steps that will be trained again.
        since = read_past(paths.run_config).went_back_s
        rows = [row for row in read_metrics(paths.metrics)[0] if row["process"] == "sft" and is_of_step(row)]
        steps = max([saved, *(row["step"] + 1 for row in rows if row.get("time_s", since) >= since)])
        return Progress(saved, steps, steps, is_empty=steps == first)
    from trireme.journal.journal import Journal  # they import numpy, which `rl --help` does not wait for
    from trireme.journal.versions import Versions

    # A step counts as trained once engines have confirmed its version, as tokens of it may be in the journal.
    confirmed = Versions(paths.journal).newest  # it may be later than the newest checkpoint
    steps = max(confirmed, saved, 0)
    filled = Journal(paths.journal).steps()
    batches = max([steps, *(batch + 1 for batch in filled)])
    return Progress(saved, steps, batches, is_empty=confirmed < 0 and not filled and steps == first)


def write_settings(config: RunConfig | SftConfig, run_file: Path, process: ProcessName | None = None) -> None:
    """Write the resolved configuration.

    On a resume with other settings, keep the earlier file, write down until which step it holds, and print the changes.

    Args:
        process: as for `check_resume`.
    """
    from trireme.journal.settings import Earlier, Past, read_past, until, write_past

    progress, previous = progress_of(config), previous_file(run_file.parent, process)
    if previous is None:
        write_run(config, run_file)
        return _write_content(config, run_file, progress)

    # The copy comes first: a crash in between loses neither.
    free = (run_file.with_suffix(f".earlier-{number}.json") for number in count(1))
    earlier = next(path for path in free if not path.exists())
    earlier.touch(mode=0o600)  # it may hold secrets
    shutil.copy2(previous, earlier)

    # Which settings held until when. What nothing was trained or filled with is left out.
    changed = changes_since(read_table(previous), config, process)
    past, entries = read_past(previous), list(read_past(previous).earlier)
    if any(each.when in ("step", "batch", "rounding", "checkpoint") for each in changed):
        rounds = progress.steps > progress.saved and any(each.when == "rounding" for each in changed)
        entries = until(entries, progress.steps, progress.batches)
        entries.append(Earlier(earlier.name, progress.steps, progress.batches, progress.saved if rounds else None))

    step = training(config).ckpt.resume_step
    went_back = time.time() if step is not None and step >= 0 else past.went_back_s
    write_past(run_file, Past(until(entries, progress.steps, progress.batches), went_back))

    # Last, so that a crash before it leaves the previous configuration in place.
    write_run(config, run_file)
    if earlier.read_bytes() == run_file.read_bytes():
        earlier.unlink()
    else:
        print_changes(config, progress, where=earlier, process=process)
    _write_content(config, run_file, progress)


def _write_content(config: RunConfig | SftConfig, run_file: Path, progress: Progress) -> None:
    """Write down what the model's folder holds when a run begins, or is resumed that an earlier version began."""
    file, found = run_file.with_name(MODEL_FILE), content_of_run(config)
    is_resumed = (config.resume or training(config).ckpt.resume_step is not None) and not progress.is_empty
    if found and file.parent == config.paths.configs and not (is_resumed and file.exists()):
        with atomic_write(file) as out:
            out.write(json.dumps(found, indent=1).encode() + b"\n")


def previous_file(folder: Path, process: ProcessName | None) -> Path | None:
    """Return the configuration that the run, or a process that starts alone, was last started with."""
    names = ("run.json", f"{process or 'trainer'}.json")
    files = [folder / name for name in names if (folder / name).exists()]
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)


def changes_since(before: dict[str, Any], config: RunConfig | SftConfig, process: ProcessName | None) -> list[Change]:
    found = changes(before, config.model_dump(mode="json"), is_sft=isinstance(config, SftConfig))
    others = {name for name in PROCESSES if process is not None and name != process}
    return [each for each in found if each.key.partition(".")[0] not in others]


def print_changes(
    config: RunConfig | SftConfig, progress: Progress, *, where: Path, process: ProcessName | None = None
) -> None:
    """Print the keys that have changed since a file was written, both values, and from when on the new one holds."""
    froms = {
        "step": f", from step {progress.steps} on",
        "checkpoint": f", from step {progress.steps} on",
        "batch": f", from step {progress.batches} on",
        "rounding": ", at once",
        "content": ", with the same content",
    }

    # Keys that may change at any time (ports, log level) are not worth a line.
    shown = [each for each in changes_since(read_table(where), config, process) if each.when != "at once"]
    if shown:
        print(f"other settings than before (those are in {where}):")
    # A table that came or went is one line.
    whole = {each.key for each in shown if ABSENT in (each.before, each.now)}
    inside = {each.key: key for each in shown for key in whole if each.key.startswith(f"{key}.")}
    for each in shown:
        if each.key in inside:
            continue
        # A changed secret is reported, and its values are not.
        one, other = (without_secrets({each.key.rpartition(".")[2]: value}) for value in (each.before, each.now))
        absent = "a table" if each.key in inside.values() else "nothing"
        values = " -> ".join(in_words(next(iter(value.values())), absent) for value in (one, other))

        # A schedule that ends with the run depends on its length.
        scheduler = training(config).scheduler.type if each.key == "max_steps" else "constant"
        rate = "" if scheduler == "constant" else f", and with it the learning rate of `{scheduler}`"
        print(f"  {each.key}: {values}{froms.get(str(each.when), '')}{rate}")

    if shown and progress.steps > progress.saved:
        print(
            f"steps {progress.saved} to {progress.steps - 1} are repeated with the settings of their time; to have the "
            f"new ones there too, go back: --{table_prefix(config)}ckpt.resume-step {progress.saved}"
        )

    if any(each.when == "rounding" for each in shown) and progress.steps > progress.saved:
        print("these steps may be rounded differently, and engines are then sent the last of their versions again")

    # The template is a file of the model and no key, so no changed key would show it.
    then, now = content_at_first(config.paths), content_of_run(config)
    if then.get("chat template", "") != now.get("chat template", "") and then:
        print(
            "the chat template, or a special token of it, is another than when the run began, from step "
            f"{progress.batches} on"
        )


def in_words(value: Any, absent: str = "nothing") -> str:
    return absent if value is ABSENT else toml_value(value)


def training(config: RunConfig | SftConfig) -> Any:
    return config if isinstance(config, SftConfig) else config.trainer


def table_prefix(config: RunConfig | SftConfig) -> str:
    return "" if isinstance(config, SftConfig) else "trainer."


# what the base model holds


def content_of_run(config: RunConfig | SftConfig) -> Content:
    names = model_names(config.model_dump(mode="json"), table_prefix(config))
    return content_of(*names, from_scratch=training(config).model.from_scratch) if names[0] else {}


def model_names(table: dict[str, Any], prefix: str) -> tuple[str, str]:
    """Return the names of model and tokenizer in a resolved configuration, as the trainer takes them."""
    trainer = table.get("trainer", {}) if prefix else table
    shared = (table.get("model") or {}).get("name")
    model = (trainer.get("model") or {}).get("name") or shared or ""
    return str(model), str((trainer.get("tokenizer") or {}).get("name") or model)


def content_at_first(paths: RunPaths) -> Content:
    try:
        found = json.loads((paths.configs / MODEL_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
