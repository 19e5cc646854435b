"""The plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Register our weight-transfer engine. vLLM may call this more than once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "trireme" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("trireme", "trireme.inference.weight_engine", "TriremeWeightEngine")
