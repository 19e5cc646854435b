"""`sft`: supervised fine-tuning, usually to make the base model of an `rl` run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trireme.base.devices import Devices, detect_devices
from trireme.base.log import start_logging
from trireme.base.network import stay_on_loopback
from trireme.base.processes import quick_imports
from trireme.cli.command import move_old_run_aside, note_translation, run_command
from trireme.config.files import to_table, to_toml, without_secrets
from trireme.config.load import load_config
from trireme.config.resolve import resolve_evaluating_run, resolve_sft
from trireme.config.rules.check import check_launch, check_sft
from trireme.config.sft import SftConfig
from trireme.launch.folder import check_folder, hold_folder
from trireme.launch.origin import begin, check_origin
from trireme.launch.ranks import RANKS_PARENT, become_ranks, end_with_parent, rank, run_ranks
from trireme.launch.resume import check_resume, is_trained
from trireme.launch.settings import write_settings


def main() -> None:
    run_command("sft", sft, abruptly=True)


def sft(argv: list[str]) -> int:
    """Return the exit code. Raises: ConfigError for what was typed, or is in the folder."""
    config, invocation = load_config(argv, SftConfig, program="sft")
    if invocation.run:
        end_with_parent()
        _train(config, invocation.run)
        return 0

    # Started by the user. The ranks take the branch above.
    devices = detect_devices()
    os.environ.update(config.env_vars)  # the ranks inherit them
    with invocation.their_keys_named():
        config = resolve_sft(config, devices)
        check_sft(config, devices)
        if config.eval:
            from trireme.orchestrator.environments.venv import find_environment  # ranks need not load it

            check_launch(resolve_evaluating_run(config, devices), devices, section="inference")
            for each in config.eval.env:
                find_environment(each.id)
    note_translation(invocation)
    if invocation.dry_run:
        print(to_toml(without_secrets(to_table(config))))
        return 0

    check_folder(config)  # a refusal leaves nothing in the user's folder
    with hold_folder(config.paths) as lock:
        check_resume(config)
        check_origin(config)
        if config.resume and is_trained(config):
            from trireme.launch.online_evaluation import missing_evaluations

            evaluates = next(missing_evaluations(config, config.max_steps), None) is not None
            left = "evaluations are missing" if evaluates else "nothing is left to do"
            print(f"all {config.max_steps} steps are trained and saved: {left}", flush=True)
            return _train_and_evaluate(config, devices, lock, is_trained=True) if evaluates else 0
        move_old_run_aside(config)
        begin(config)
        write_settings(config, config.paths.run_config)
        if config.eval:
            return _train_and_evaluate(config, devices, lock)
        _train(config, config.paths.run_config)
    return 0


def _train_and_evaluate(config: SftConfig, devices: Devices, lock: int, *, is_trained: bool = False) -> int:
    """Train in processes of their own, also with one rank, next to an engine that is given each step that is due.

    Returns: the exit code of the training, which no evaluation changes; 128 + N after signal N.
    """
    from trireme.launch.online_evaluation import open_evaluation

    run_file = config.paths.run_config
    os.environ[RANKS_PARENT] = str(os.getpid())
    with open_evaluation(config, devices, keep_open=(lock,)) as evaluation:
        command = [sys.executable, "-m", "trireme.cli.sft", "--run", str(run_file)]
        code = 0 if is_trained else run_ranks(config.num_ranks or 1, command, evaluation.look)
        return code or evaluation.finish()


def _train(config: SftConfig, run_file: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads or 1))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads take a core from busy ones
    stay_on_loopback()
    become_ranks(config.num_ranks or 1, ["trireme.cli.sft", "--run", str(run_file)])
    start_logging("sft" if rank() == 0 else f"sft.{rank()}", config.log_level)

    with quick_imports():
        from trireme.trainer.out_of_memory import explain_out_of_memory
        from trireme.trainer.sft.loop import train_sft

    with explain_out_of_memory(""):
        train_sft(config)


if __name__ == "__main__":
    main()
