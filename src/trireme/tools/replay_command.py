"""`trireme replay RUN`: train a run again from its journal, without engines, and compare all weights to the bit."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from pathlib import Path

from trireme.base.devices import Devices, detect_devices
from trireme.base.errors import ConfigError, JournalCorrupt
from trireme.base.log import start_logging
from trireme.base.network import stay_on_loopback
from trireme.base.paths import RunPaths, step_folder
from trireme.config.files import find_run_file, read_run, toml_value
from trireme.config.resolve import updated
from trireme.config.resume import changes
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.manifest import complete_steps
from trireme.journal.settings import Settings
from trireme.journal.versions import Versions
from trireme.launch.plan import plan, set_environment
from trireme.launch.ranks import RANKS_PARENT, become_ranks, end_with_parent


def command(argv: list[str]) -> int:
    """Replay a run, and return the exit code. Several ranks are started by this process, and each calls this again.

    Raises: ConfigError if there is no such run, or not these steps of it; JournalCorrupt if a batch, or the
        record of a version, is missing or not what was written.
    """
    parser = ArgumentParser(
        prog="trireme replay",
        description="Trains a run again from its journal, with as many ranks and threads, and compares the digests of "
        "each version with those that engines confirmed. Writes nothing.",
        epilog="Ends with 0 where every version has the same bits, 1 at the first difference, 2 where there is nothing "
        "to replay. On a GPU a difference is no contradiction: it is shown, and the command ends with 0.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="the run's folder; it may have been moved")
    add("--until", metavar="N", dest="last", type=int, help="stop at version N; all where not given")
    add("--from", metavar="K", dest="first", type=int, help="start from the checkpoint of step K")
    add("--run-code", action="store_true", help="run a custom loss, or a model's own code, of this run")
    add("--keep-going", action="store_true", help="also after the first difference")

    arguments = parser.parse_args(argv)

    run_file = find_run_file(arguments.run, "trainer")
    config = read_config(arguments.run, run_file, detect_devices())
    paths = {path for own in config.losses.values() if (path := own.trainer.loss.path)}
    code = {"trainer.loss.path": ", ".join(sorted(paths)), "trust_remote_code": config.trainer.model.trust_remote_code}
    if named := [f"{key} = {value}" for key, value in code.items() if value and not arguments.run_code]:
        # the author of the folder could have anything run on this machine
        raise ConfigError(
            f"{arguments.run} names code that a replay runs ({', '.join(named)}) - expected a run of code that you "
            "trust. Add `--run-code` where you trust it."
        )

    # Variables can name code, too.
    if not arguments.run_code:
        config = updated(config, {"env_vars": {}, "trainer.env_vars": {}})

    span = find_span(config.paths, arguments.first, arguments.last)
    config = as_built(config, span)
    if RANKS_PARENT in os.environ:
        end_with_parent()
    else:
        set_environment(plan(config, run_file, detect_devices())["trainer"].env)

    stay_on_loopback()
    become_ranks(config.trainer.num_ranks or 1, ["trireme.cli.trireme", "replay", *argv])
    start_logging("replay", "warning")

    from trireme.tools.replay import replay  # with torch behind it

    return replay(config, span, keep_going=arguments.keep_going)


def read_config(run: Path, run_file: Path, devices: Devices) -> RunConfig:
    """Read the run's configuration, with the paths of its present folder and GPUs of this machine.

    Raises: ConfigError if there are too few GPUs.
    """
    config = updated(read_run(RunConfig, run_file), {"name": None, "output_dir": run})
    if config.device != "cuda":
        return config
    ranks = config.trainer.num_ranks or 1
    if devices.num_gpus < ranks:
        raise ConfigError(
            f"{run} was trained on {ranks} GPUs - there are {devices.num_gpus} here. Replay it where there are enough: "
            "other devices round differently."
        )

    # The number of GPUs decides the order of sums, their ids do not: take those that are here.
    ids = config.trainer_gpu_ids or ()
    fits = len(ids) == ranks and max(ids) < devices.num_gpus
    return config if fits else updated(config, {"trainer_gpu_ids": tuple(range(ranks))})


def as_built(config: RunConfig, span: range) -> RunConfig:
    """Return the configuration with the model and the ranks that the steps were trained with.

    Raises: ConfigError if these were others within the span, as the run was resumed in between.
    """
    settings = Settings(config)
    for begin, _ in settings.eras():
        # The model and its ranks are built once, so nothing that shapes them may change within the span.
        before, now = (settings.built(max(0, step)).model_dump(mode="json") for step in (begin - 1, begin))
        found = [each for each in changes(before, now, is_sft=False) if each.when in ("rounding", "checkpoint")]
        if found and begin in span[1:]:
            key = found[0]
            raise ConfigError(
                f"Steps {span.start} to {begin - 1} were trained with `{key.key}` = {toml_value(key.before)}, those "
                f"from {begin} on with {toml_value(key.now)} - expected one value in a replay, which builds the model "
                f"and its ranks once. Replay each by itself: `--until {begin}`, and `--from` a checkpoint of step "
                f"{begin} or later."
            )
    return settings.built(span.start)


def find_span(paths: RunPaths, first: int | None, last: int | None) -> range:
    """Return the steps from version `first`, or the run's first, to version `last`, or to the newest.

    Raises:
        ConfigError: the run has no such versions, no checkpoint to start from, or no recorded result.
        JournalCorrupt: a batch in between is missing.
    """
    journal, versions = Journal(paths.journal), Versions(paths.journal)
    begin = journal.first()
    newest = max(begin, versions.newest, *(step + 1 for step in journal.steps()))

    first = begin if first is None else first
    span = range(first, newest if last is None else last)
    if not begin <= span.start <= span.stop <= newest:
        raise ConfigError(
            f"Versions {span.start} to {span.stop} were asked for, the run in {paths.root} has {begin} to {newest}. "
            "Give `--from` and `--until` within these."
        )

    # The first version is the base model, or lies in `origin/`; any other start needs its optimizer state.
    if first != begin and first not in (have := complete_steps(paths.checkpoints)):
        raise ConfigError(
            f"There is no whole checkpoint of step {first} in {paths.checkpoints} - it has {have or 'none'}. "
            "Give `--from` one of these, or leave it out to start from the beginning."
        )

    missing = next((step for step in span if not journal.has(step)), None)
    if missing is not None:
        raise JournalCorrupt(
            f"{journal.path(missing)} is not there: without batch {missing}, version {span.stop} cannot be trained "
            f"again. Restore it, or stop before it with `--until {missing}`, or start after it with `--from`."
        )

    # With no recorded version there is nothing to compare with, and a replay would prove nothing.
    recorded = (versions.has(version) or step_folder(paths.weights, version).is_dir() for version in (*span, span.stop))
    if not any(recorded):
        raise ConfigError(
            f"Nothing is recorded of versions {span.start} to {span.stop} in {paths.root} - expected "
            f"{versions.path(span.start)} and its like, which say what engines confirmed. Replay a run that has them."
        )
    return span
