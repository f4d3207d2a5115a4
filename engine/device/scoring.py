"""What does a row say of given tokens, on a device? Log-probs by one kernel, all else as elsewhere.

Alone asked for, log-probs need no logits that are kept. Knows no turns.

Letters in shapes: P positions told of, H hidden.
"""

from collections.abc import Callable, Sequence

import torch

from tidegate.engine.device.sampling import coming
from tidegate.engine.scoring import RowScore, RowScoring, score_rows
from tidegate.engine.weights.weights import Weights
from tidegate.kernels.head_logprobs import head_logprobs_triton

PendingScore = Callable[[], RowScore]
"""Reads a score once the device is done."""


def launch_scores(
    weights: Weights, hidden: torch.Tensor, rows: Sequence[RowScoring]
) -> list[PendingScore]:
    """What rows say whose normed hidden states [all P, H] lie one after another."""
    parts = hidden.split_with_sizes([row.positions for row in rows])
    return [_launch(weights, part, row) for part, row in zip(parts, rows, strict=True)]


def _launch(weights: Weights, hidden: torch.Tensor, row: RowScoring) -> PendingScore:
    if row.reads != "logprobs" or row.top_logprobs:
        (score,) = score_rows(weights, hidden, [row])
        return lambda: score
    told = head_logprobs_triton(
        hidden.float(),
        weights.head.unpacked(),
        torch.from_numpy(row.token_ids).long().to(hidden.device),
        temperature=row.temperature,
        soft_cap=weights.config.logits_soft_cap,
    )
    logprobs = coming(told.logprobs)
    return lambda: RowScore(logprobs=logprobs.numpy())
