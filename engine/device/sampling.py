"""Samples a step's tokens on the GPU, and on the host for the few rows with unusual options.

Used by ``DeviceRunner``. One fused kernel does temperature, top-k, top-p and min-p. Rows with
penalties, bias, logit processors or top log-probs are copied to the host once, and sampled by the
CPU engine's code; no other row's logits are copied.

Letters in shapes: S sampling rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.sampling.sampling import (
    RowDetails,
    RowSampling,
    StepOutput,
    random_numbers,
    sample_rows,
)
from tidegate.kernels.fused_sampling import SamplingColumns, fused_sample_triton
from tidegate.kernels.uniforms import uniforms


class HostDraw:
    """Sampling parameters of a step's rows, as arrays to upload."""

    def __init__(self, sampling: Sequence[RowSampling]) -> None:
        self.sampling = sampling
        self.apart = [row for row, one in enumerate(sampling) if is_drawn_on_host(one)]
        """Indices of the rows that are sampled on the host."""
        self.arrays: list[npt.NDArray[Any]] = [
            np.array([one.temperature for one in sampling], np.float32),
            np.array([one.top_k for one in sampling], np.int64),
            np.array([one.top_p for one in sampling], np.float32),
            np.array([one.options.min_p if one.options else 0.0 for one in sampling], np.float32),
            uniforms(*random_numbers(sampling)),
            np.array(self.apart, np.int64),
        ]

    def launch(self, logits: torch.Tensor, sent: Sequence[torch.Tensor]) -> "PendingDraw":
        """Launch sampling from ``logits`` [S, V]; ``sent`` are the uploaded ``arrays``."""
        *columns, apart = sent
        token_ids, logprobs = fused_sample_triton(logits, SamplingColumns(*columns))
        over = coming(logits.index_select(0, apart)) if self.apart else None
        return PendingDraw(self, coming(token_ids), coming(logprobs), over)


@dataclass(frozen=True, slots=True)
class PendingDraw:
    """Samples on their way to the host; readable after the device has been synchronised."""

    draw: HostDraw
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    logits: torch.Tensor | None
    """Logits of the rows sampled on the host; None if there are none."""

    def read(self) -> StepOutput:
        """Return the samples, after sampling the remaining rows on the host."""
        token_ids = self.token_ids.numpy().astype(np.int32)
        logprobs = self.logprobs.numpy()
        if self.logits is None:
            return StepOutput(token_ids, logprobs)
        apart = self.draw.apart
        here = sample_rows(self.logits, [self.draw.sampling[row] for row in apart])
        token_ids[apart], logprobs[apart] = here.token_ids, here.logprobs
        details: dict[int, RowDetails] = {apart[n]: told for n, told in here.details.items()}
        failures = {apart[n]: why for n, why in here.failures.items()}
        return StepOutput(token_ids, logprobs, details, failures)


def coming(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying ``tensor`` to the host, in pinned memory; valid after synchronisation."""
    return tensor.to("cpu", non_blocking=True)


def is_drawn_on_host(one: RowSampling) -> bool:
    """Whether a row uses options that the kernel does not support."""
    asked = one.options
    return asked is not None and bool(
        asked.edit_by_output
        or len(asked.bias_ids)
        or one.index < asked.min_tokens
        or asked.top_logprobs
        or asked.raw_logprobs
    )
