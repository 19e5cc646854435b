"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Adds our weight-transfer engine to vLLM's registry and, on a CPU, norms and small blocks. vLLM may call this more
    than once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "trireme" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("trireme", "trireme.inference.weight_engine", "TriremeWeightEngine")

    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from trireme.inference import blocks, norms

        blocks.register()
        norms.register()
