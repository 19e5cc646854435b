"""`trireme export RUN`: a checkpoint becomes a model as Hugging Face has it, without GPUs and with little memory."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.log import start_logging
from trireme.base.paths import RunPaths, require_new_folder, step_folder, step_of
from trireme.journal.manifest import MANIFEST, complete_steps

DTYPES = ("bfloat16", "float16", "float32")
MERGED_DTYPE = "bfloat16"


def command(argv: list[str]) -> int:
    """Export a checkpoint, and return 0 when all is on disk.

    Raises: ConfigError if there is none, or no place for it; OSError without room; JournalCorrupt if damaged.
    """
    parser = ArgumentParser(
        prog="trireme export",
        description="Writes a checkpoint of an `rl` or `sft` run as `transformers` and vLLM load it: the same files as "
        "the run's own `weights/step_N`. Needs no GPU, and memory for one tensor.",
        epilog="Ends with 0 when all is on disk, 2 where there is nothing to export, or no place for it.",
    )
    add = parser.add_argument
    add("source", metavar="RUN", type=Path, help="the run's folder, or a checkpoint's")
    add("--step", metavar="N", type=int, help="of the checkpoint; the newest where not given")
    add("--to", metavar="FOLDER", type=Path, help="a folder that is empty, or not there; RUN/weights/step_N by default")
    add("--dtype", choices=DTYPES, help=f"of the weights; by default the run's own, {MERGED_DTYPE} with --merge")
    add("--merge", action="store_true", help="of a run that trains adapters: the whole model with them added in")
    add("--base", metavar="MODEL", help="with --merge: where the base model is now, if not where the run had it")
    add("--trust-remote-code", action="store_true", help="with --merge: run Python code that comes with the base model")
    arguments = parser.parse_args(argv)

    checkpoint = find_checkpoint(arguments.source, arguments.step)

    # By default the export lies where the run writes its own weights of that step.
    folder = arguments.to
    if folder is None and (place := checkpoint.resolve()).parent.name == "checkpoints":
        folder = RunPaths(place.parent.parent).weights / place.name
    if folder is None:
        raise ConfigError(f"{checkpoint} lies in no run's folder - expected to be told where to write. Set `--to`.")
    require_new_folder(folder, "--to")
    if not arguments.merge and (arguments.base or arguments.trust_remote_code):
        raise ConfigError(
            "`--base` and `--trust-remote-code` were given without `--merge` - expected them together with it only. "
            "Add `--merge`, or leave them out."
        )
    start_logging("export", "warning")

    if arguments.merge:
        from trireme.tools.export.merging import export_merged

        options = {"base_model": arguments.base, "trust_remote_code": arguments.trust_remote_code}
        export_merged(checkpoint, folder, dtype=arguments.dtype or MERGED_DTYPE, **options)
    else:
        from trireme.trainer.checkpoint.export import export_checkpoint

        export_checkpoint(checkpoint, folder, dtype=arguments.dtype)
    print(f"{checkpoint} -> {folder}")
    return 0


def find_checkpoint(source: Path, step: int | None) -> Path:
    """Return the checkpoint that is meant: a folder with a manifest, or a step of a run.

    Raises: ConfigError if there is none.
    """
    if (source / MANIFEST).is_file():
        if step not in (None, step_of(source)):
            raise ConfigError(f"{source} is a checkpoint, and `--step {step}` is another - expected one of the two.")
        return source

    folder = RunPaths(source).checkpoints
    steps = complete_steps(folder)
    if not steps:
        raise ConfigError(
            f"{folder} holds no complete checkpoint - expected the folder of a run, or of a checkpoint ({MANIFEST} in "
            "it). Check the path."
        )
    if step is not None and step not in steps:
        raise ConfigError(f"There is no complete checkpoint of step {step} in {folder} - it has {steps}. Take one.")
    return step_folder(folder, steps[-1] if step is None else step)
