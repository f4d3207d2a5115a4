"""What does each row of a step sample, on a device? From logits there to tokens here.

Temperature, top-k, top-p and min-p are one kernel's. What few turns ask for (penalties, bias,
processors, told alternatives) is done on the host by the code of an engine without a device: their
rows' logits come over, once, and nobody else's do.

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
    """How a step's rows are drawn, as arrays on the host."""

    def __init__(self, sampling: Sequence[RowSampling]) -> None:
        self.sampling = sampling
        self.apart = [row for row, one in enumerate(sampling) if is_drawn_on_host(one)]
        """Rows whose logits come over."""
        self.arrays: list[npt.NDArray[Any]] = [
            np.array([one.temperature for one in sampling], np.float32),
            np.array([one.top_k for one in sampling], np.int64),
            np.array([one.top_p for one in sampling], np.float32),
            np.array([one.options.min_p if one.options else 0.0 for one in sampling], np.float32),
            uniforms(*random_numbers(sampling)),
            np.array(self.apart, np.int64),
        ]

    def launch(self, logits: torch.Tensor, sent: Sequence[torch.Tensor]) -> "PendingDraw":
        """Draw from ``logits`` [S, V] with ``arrays`` once they are ``sent``; waits for nothing."""
        *columns, apart = sent
        token_ids, logprobs = fused_sample_triton(logits, SamplingColumns(*columns))
        over = coming(logits.index_select(0, apart)) if self.apart else None
        return PendingDraw(self, coming(token_ids), coming(logprobs), over)


@dataclass(frozen=True, slots=True)
class PendingDraw:
    """What is on its way to the host; to be read once the device is done."""

    draw: HostDraw
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    logits: torch.Tensor | None
    """Of the rows apart."""

    def read(self) -> StepOutput:
        """What was drawn, and what is drawn here."""
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
    """``tensor`` here, once the device is done: torch copies to pinned memory then."""
    return tensor.to("cpu", non_blocking=True)


def is_drawn_on_host(one: RowSampling) -> bool:
    """Whether a row asks for what the kernel doesn't do."""
    asked = one.options
    return asked is not None and bool(
        asked.edit_by_output
        or len(asked.bias_ids)
        or one.index < asked.min_tokens
        or asked.top_logprobs
        or asked.raw_logprobs
    )
