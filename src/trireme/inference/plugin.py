"""The plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Register our weight-transfer engine and, on a CPU, our norms. vLLM may call this more than once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "trireme" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("trireme", "trireme.inference.weight_engine", "TriremeWeightEngine")

    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from trireme.inference.cpu import norms

        norms.register()
