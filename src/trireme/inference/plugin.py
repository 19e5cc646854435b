"""The plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Register our weight-transfer engine and our loader. vLLM may call this more than once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import register_model_loader

    from trireme.inference.published_loader import PublishedLoader

    if "trireme" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("trireme", "trireme.inference.weight_engine", "TriremeWeightEngine")
        register_model_loader("trireme")(PublishedLoader)
