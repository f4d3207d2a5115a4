"""Samples a step's tokens on the GPU, and on the host for the few rows with unusual options.

One fused kernel does temperature, top-k, top-p and min-p. Rows with penalties, bias, logits
processors or attachments are copied to the host once, and sampled by the CPU engine's code; no
other row's logits are copied.

Letters in shapes: S sampling rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.execution.runner import DecodeRows
from tidegate.engine.sampling.sampling import (
    RowSampling,
    StepOutput,
    TokenAttachments,
    limits,
    random_numbers,
    sample_rows,
)
from tidegate.kernels.fused_sampling import SamplingColumns, fused_sample_triton
from tidegate.kernels.uniforms import uniforms


class HostDraw:
    """Sampling parameters of a step's rows, as arrays to upload."""

    def __init__(self, sampling: Sequence[RowSampling]) -> None:
        self.sampling = sampling
        self.host_rows = [row for row, params in enumerate(sampling) if is_sampled_on_host(params)]
        """Indices of the rows that are sampled on the host."""
        self.arrays: list[npt.NDArray[Any]] = [
            *limits(sampling),
            np.array(
                [each.options.params.min_p if each.options else 0.0 for each in sampling],
                np.float32,
            ),
            uniforms(*random_numbers(sampling)),
            np.array(self.host_rows, np.int64),
        ]

    @classmethod
    def of_decodes(cls, rows: DecodeRows) -> "HostDraw":
        """Return the parameters of rows that decode together."""
        if rows.options:
            return cls([row.sampling for row in rows if row.sampling is not None])
        made = cls([])
        made.arrays = [
            rows.columns.temperatures,
            rows.columns.top_k,
            rows.columns.top_p,
            np.zeros(len(rows), np.float32),
            uniforms(rows.columns.seeds, rows.columns.draws),
            np.empty(0, np.int64),
        ]
        return made

    def launch(self, logits: torch.Tensor, uploaded: Sequence[torch.Tensor]) -> "PendingDraw":
        """Launch sampling from ``logits`` [S, V]; ``uploaded`` are the uploaded ``arrays``."""
        *columns, host_rows = uploaded
        token_ids, logprobs = fused_sample_triton(logits, SamplingColumns(*columns))
        host_logits = copy_to_host(logits.index_select(0, host_rows)) if self.host_rows else None
        return PendingDraw(self, copy_to_host(token_ids), copy_to_host(logprobs), host_logits)


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
        host_rows = self.draw.host_rows
        host_output = sample_rows(self.logits, [self.draw.sampling[row] for row in host_rows])
        token_ids[host_rows], logprobs[host_rows] = host_output.token_ids, host_output.logprobs
        attachments: dict[int, TokenAttachments] = {
            host_rows[i]: each for i, each in host_output.attachments.items()
        }
        failures = {host_rows[i]: reason for i, reason in host_output.failures.items()}
        return StepOutput(token_ids, logprobs, attachments, failures)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying ``tensor`` to the host, in pinned memory; valid after synchronisation."""
    return tensor.to("cpu", non_blocking=True)


def is_sampled_on_host(params: RowSampling) -> bool:
    """Whether a row uses options that the kernel does not support."""
    options = params.options
    return options is not None and bool(
        options.edit_by_output
        or len(options.bias_ids)
        or params.index < options.min_tokens
        or params.is_reported
    )
