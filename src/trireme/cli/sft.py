"""`sft`: supervised fine-tuning, usually to make the base model of an `rl` run."""

from __future__ import annotations

import os
from pathlib import Path

from trireme.base.devices import detect_devices
from trireme.base.log import start_logging
from trireme.base.network import stay_on_loopback
from trireme.base.processes import quick_imports
from trireme.cli.command import move_old_run_aside, note_translation, run_command
from trireme.config.files import to_table, to_toml, without_secrets
from trireme.config.load import load_config
from trireme.config.resolve import resolve_sft
from trireme.config.rules.check import check_sft
from trireme.config.sft import SftConfig
from trireme.launch.folder import check_folder, hold_folder
from trireme.launch.origin import begin, check_origin
from trireme.launch.ranks import become_ranks, end_with_parent, rank
from trireme.launch.resume import check_resume, is_trained
from trireme.launch.settings import write_settings


def main() -> None:
    run_command("sft", sft, abruptly=True)


def sft(argv: list[str]) -> None:
    config, invocation = load_config(argv, SftConfig, program="sft")
    if invocation.run:
        end_with_parent()
        _train(config, invocation.run)
        return

    # Started by the user. The ranks take the branch above.
    devices = detect_devices()
    os.environ.update(config.env_vars)  # the ranks inherit them
    with invocation.their_keys_named():
        config = resolve_sft(config, devices)
        check_sft(config, devices)
    note_translation(invocation)
    if invocation.dry_run:
        print(to_toml(without_secrets(to_table(config))))
        return

    check_folder(config)  # a refusal leaves nothing in the user's folder
    with hold_folder(config.paths):
        check_resume(config)
        check_origin(config)
        if config.resume and is_trained(config):
            print(f"all {config.max_steps} steps are trained and saved: nothing is left to do")
            return
        move_old_run_aside(config)
        begin(config)
        write_settings(config, config.paths.run_config)
        _train(config, config.paths.run_config)


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
