"""Files of a model as others read them."""

import json

import torch
from safetensors.torch import load_file

from trireme.trainer.checkpoint.hf_files import write_model
from trireme.transport.weights.buckets import spec_of


def test_files_of_the_most_allowed_size_hold_all_tensors_once(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(size, 3, generator=generator).bfloat16() for i, size in enumerate([4, 5, 40, 1, 1])}
    tensors["scalar"] = torch.tensor(3.5)
    tensors["counts"] = torch.arange(3)
    tensors["none"] = torch.zeros(0, 4)
    specs = [spec_of(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    write_model(tmp_path, specs, tensors.items(), max_file_bytes=80)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = [name.split("-")[1] for name in index["weight_map"].values()]
    assert files == ["00001"] * 2 + ["00002"] + ["00003"] * 5  # 54, 240, 40 bytes
    assert index["metadata"]["total_size"] == 54 + 240 + 40
    found = {}
    for file in set(index["weight_map"].values()):
        found |= load_file(tmp_path / file)
    assert found.keys() == tensors.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
