"""How many bytes of tensors are alive at once."""

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Measure the peak of all tensors that this thread makes, each storage counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._holders: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in _locals((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _locals(result):
            place, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
            if not size or (place in given and place not in self._holders):
                continue  # a view of what was there before
            if place not in self._holders:
                self._holders[place] = 0
                self._now += size
                self.peak = max(self.peak, self._now)
            self._holders[place] += 1
            weakref.finalize(tensor, self._release, place, size)
        return result

    def _release(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        if not self._holders[place]:
            del self._holders[place]
            self._now -= size


def _locals(values: Any) -> list[torch.Tensor]:
    tensors = (each.to_local() if isinstance(each, DTensor) else each for each in tree_iter(values))
    return [each for each in tensors if isinstance(each, torch.Tensor) and each.device.type != "meta"]
