"""The plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`), and our loader of weights.

`PublishedLoader` has vLLM read low-bit weights as the trainer does, for layers that hold them in the engine's own
precision. Without it vLLM would build quantized layers, which cannot take the trainer's weights. `server.py` asks for
it by `--load-format trireme`, and takes `quantization_config` out of the model's configuration. Checked against vLLM
0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from vllm.config import LoadConfig, ModelConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from trireme.config.model.folder import quantization_of, read_config
from trireme.transport.weights.published_files import PublishedFiles


def register() -> None:
    """Register our weight-transfer engine and our loader. vLLM may call this more than once per process."""
    if "trireme" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("trireme", "trireme.inference.weight_engine", "TriremeWeightEngine")
        register_model_loader("trireme")(PublishedLoader)


class PublishedLoader(DefaultModelLoader):
    """vLLM's loader of safetensors files, which decodes their tensors one by one."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        if getattr(model_config.hf_config, "quantization_config", 0) is None:
            del model_config.hf_config.quantization_config  # gpt-oss asks whether it is there
        super().load_weights(model, model_config)

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, torch.Tensor]]:
        name = source.model_or_path
        _, paths, _, _ = self._prepare_weights(
            name, source.subfolder, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
        )
        files = PublishedFiles([Path(path) for path in paths], quantization_of(read_config(name)))
        return ((f"{source.prefix}{each}", files.read(each, ())) for each in files.shapes)
