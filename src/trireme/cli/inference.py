"""`inference`: serve the policy with vLLM. Started by `rl`, or alone, or to join a running run."""

from __future__ import annotations

from trireme.base.devices import detect_devices
from trireme.base.log import start_logging
from trireme.cli.command import open_process, run_command


def main() -> None:
    run_command("inference", inference)


def inference(argv: list[str]) -> int | None:
    if any(word.partition("=")[0] == "--join" for word in argv):
        from trireme.launch.joined_engine import join

        return join(argv)

    config, _ = open_process("inference", argv)
    start_logging("inference", config.log_level)

    # vLLM would measure free memory while the trainer allocates on the same GPU, so it is given a size.
    if config.shares_gpus:
        from trireme.tools.plan.advice import size_kv_cache

        config = size_kv_cache(config, detect_devices())

    from trireme.inference.server import serve

    serve(config)
    return 0


if __name__ == "__main__":
    main()
