"""`rl`: one command for the whole run. Loads, checks, shows or starts."""

from __future__ import annotations

import os
from pathlib import Path

from trireme.base.devices import Devices, detect_devices
from trireme.base.errors import ConfigError
from trireme.base.token import adopt_token, make_token, status_key, token, write_key
from trireme.cli.command import (
    move_old_run_aside,
    note_provenance,
    note_translation,
    print_warnings,
    run_command,
    show,
)
from trireme.config.arguments import is_yaml_run
from trireme.config.files import ProcessName, write_process_files
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules.check import check, check_launch
from trireme.config.run import RunConfig
from trireme.launch.folder import check_folder, hold_folder
from trireme.launch.origin import begin, check_origin
from trireme.launch.plan import plan
from trireme.launch.resume import check_resume, is_trained
from trireme.launch.settings import print_changes, progress_of, write_settings


def main() -> None:
    run_command("rl", rl)


def rl(argv: list[str]) -> int:
    devices = detect_devices()
    if is_yaml_run(argv):
        from trireme.tools.formats.yaml_run import read_yaml_run  # files of TOML need none of it

        config, invocation = read_yaml_run(argv)
    else:
        config, invocation = load_run_config(argv, program="rl")
    os.environ.update(config.env_vars)  # some decide where models are looked for

    # What went wrong is said in the keys that the user wrote.
    with invocation.their_keys_named():
        if not invocation.run:
            config = resolve(config, devices)
        check(config, devices)
        note_translation(invocation)
        return dry_run(config, devices) if invocation.dry_run else launch(config, devices)


def dry_run(config: RunConfig, devices: Devices) -> int:
    """Write the resolved configuration without replacing a run's own. Return 2 if the run would not start."""
    problems = show(config, devices)
    if not problems:
        _print_fit_warnings(config, devices)

    # Collect all problems: a dry run shows everything that prevents a start, not only the first.
    for look in (check_folder, check_resume, check_origin, find_environments):
        try:
            look(config)
        except ConfigError as error:
            problems.append(str(error))
            print(f"\nnot ready: {error}")

    folder = config.paths.configs / "dry-run"
    run_file = folder / config.paths.run_config.name
    run_file.unlink(missing_ok=True)  # left by an earlier dry run
    write_configs(config, folder)

    is_resumed = config.resume or config.trainer.ckpt.resume_step is not None
    if is_resumed and config.paths.run_config.exists():
        print_changes(config, progress_of(config), where=config.paths.run_config)
    print(f"\nresolved configuration written to {folder}")
    return ConfigError.exit_code if problems else 0


def launch(config: RunConfig, devices: Devices, processes: tuple[ProcessName, ...] = ()) -> int:
    """Start a resolved run and supervise it to its end. Return its exit code.

    Args:
        processes: those to start, next to an engine that the user starts; all if empty.

    Raises: ConfigError if the run cannot start. Nothing is changed then.
    """
    from trireme.launch.dashboard import run_dashboard
    from trireme.launch.supervise import supervise

    check_folder(config)  # a refusal leaves nothing in the user's folder
    if config.paths.root.exists():
        with hold_folder(config.paths):  # afterwards processes of a killed launcher are gone, and their ports free
            pass

    # A run that cannot start is refused before anything is written.
    check_resume(config)
    check_origin(config)
    if config.resume and is_trained(config):
        from trireme.orchestrator.loop import is_over

        if is_over(config):
            print(f"all {config.max_steps} steps are trained, confirmed, evaluated and saved: nothing is left to do")
            return 0

    for section in processes or (None,):
        check_launch(config, devices, section=section)
    print_warnings(config)
    adopt_token(config.hosts.token_file)

    # An engine that the user starts cannot know a token that is made here.
    is_of_this_run = not processes and make_token()
    find_environments(config)
    if config.device == "cuda":  # on CPUs nothing is planned, and nothing is loaded for it
        _print_fit_warnings(config, devices)

    # From here on the folder is ours, and is changed.
    with hold_folder(config.paths) as lock:
        move_old_run_aside(config)
        begin(config)
        write_configs(config, config.paths.configs)
        write_key(config.paths.root, token() if is_of_this_run else status_key())
        note_provenance(config, devices)

        whole = plan(config, config.paths.run_config, devices)
        with run_dashboard(config):
            return supervise({name: whole[name] for name in processes or whole}, config, keep_open=(lock,))


def _print_fit_warnings(config: RunConfig, devices: Devices) -> None:
    from trireme.tools.plan.advice import fit_warnings

    for warning in fit_warnings(config, devices):
        print(f"warning: {warning}", flush=True)


def find_environments(config: RunConfig) -> None:
    """Look for all environments before engines are started for them.

    Raises: ConfigError if one does not exist.
    """
    from trireme.orchestrator.environments.venv import find_environment

    for environment in config.orchestrator.all_environments:
        find_environment(environment.id)


def write_configs(config: RunConfig, folder: Path) -> None:
    """Write the resolved configuration, and that of each process. On a resume, the changes are printed."""
    write_settings(config, folder / config.paths.run_config.name)
    write_process_files(config, folder)


if __name__ == "__main__":
    main()
