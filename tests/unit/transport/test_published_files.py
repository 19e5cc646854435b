"""Values of published files, as they are meant."""

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from trireme.base.errors import ConfigError
from trireme.transport.weights.published_files import PublishedFiles


def test_any_region_is_that_of_the_whole_and_scales_may_be_exponents(tmp_path):
    numbers, path = torch.Generator().manual_seed(1), tmp_path / "model.safetensors"
    blocks = torch.randint(256, (2, 3, 2, 16), generator=numbers, dtype=torch.uint8)
    scales = torch.tensor([0, 1, 2, 100, 126, 127, 128, 129, 130, 200, 253, 254], dtype=torch.uint8).reshape(2, 3, 2)
    save_file({"e_blocks": blocks, "e_scales": scales}, path)
    files = PublishedFiles([path], {"quant_method": "mxfp4"})
    region = (slice(1, 2), slice(5, 64), slice(1, 3))
    assert torch.equal(files.read("e", region), convert_moe_packed_tensors(blocks, scales)[region])
    values = torch.randn(2, 140, 70, generator=numbers).to(torch.float8_e4m3fn)
    exponents, region = scales.transpose(1, 2)[:, :1], (slice(1, 2), slice(33, 135), slice(29, 65))
    for stored in (exponents.contiguous(), torch.exp2(exponents.float() - 127)):
        save_file({"w": values, "w_scale_inv": stored}, path)
        files = PublishedFiles([path], {"quant_method": "fp8", "weight_block_size": [140, 30]})
        whole = values.double() * torch.exp2(exponents.double() - 127).repeat_interleave(30, 2)[..., :70]
        assert torch.equal(files.read("w", region), whole[region].bfloat16())


def test_values_without_their_scales_are_refused_by_name(tmp_path):
    values = torch.ones(200, 64).to(torch.float8_e4m3fn)
    for scales, words in (
        ({}, r"a.weight as F8_E4M3 without scales .*Take such a copy"),
        ({"a.weight_scale_inv": torch.ones(1, 1)}, r"a.weight_scale_inv \[1, 1\] .*expected \[2, 1\]"),
    ):
        save_file({"a.weight": values, **scales}, tmp_path / "m.safetensors")
        with pytest.raises(ConfigError, match=words):
            PublishedFiles([tmp_path / "m.safetensors"], {"quant_method": "fp8", "weight_block_size": [128, 128]})
