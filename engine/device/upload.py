"""How do a step's numbers get to a device? All in one transfer, which the host does not wait for.

It knows nothing of what they mean. Memory of both sides is kept from step to step and only grows:
so whoever sends again must know that the step before is done.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.device.devices import CPU

ALIGNMENT_BYTES = 16
"""Triton compiles a kernel anew for a pointer that is aligned to less."""

DTYPES: dict[Any, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Upload:
    """A buffer here, pinned where there is something to pin it for, and one there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grow(1 << 16)

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """The arrays on the device, good until the next call."""
        sizes = [-(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for array in arrays]
        *starts, end = accumulate(sizes, initial=0)
        if end > self._here.numel():
            self._grow(max(end, 2 * self._here.numel()))
        bytes_here = self._here.numpy()
        for start, array in zip(starts, arrays, strict=True):
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            bytes_here[start : start + array.nbytes] = raw
        self._there[:end].copy_(self._here[:end], non_blocking=True)
        return [
            self._there[start : start + array.nbytes].view(DTYPES[array.dtype]).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _grow(self, nbytes: int) -> None:
        is_pinned = self._device.type != CPU
        self._here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._there = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
