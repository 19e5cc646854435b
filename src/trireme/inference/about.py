"""What vLLM makes of this machine, as a line of JSON: `python -m trireme.inference.about`, for `trireme doctor`."""

from __future__ import annotations

import json
import time
from typing import Any


def about() -> dict[str, Any]:
    """Raises whatever keeps vLLM, its kernels, or an internal of it that we touch from loading."""
    began = time.monotonic()
    import vllm
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    current_platform.import_kernels()
    load_general_plugins()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    import trireme.inference.vllm_api as touched
    import trireme.inference.weight_engine

    return {
        "vllm": vllm.__version__,
        "platform": current_platform.device_type,
        "plugin": "trireme" in WeightTransferEngineFactory._registry,
        "worker": trireme.inference.weight_engine.__name__,
        "internals": touched.__all__,
        "seconds": time.monotonic() - began,
    }


if __name__ == "__main__":
    print(json.dumps(about()))
