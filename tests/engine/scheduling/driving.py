"""Drives a ModelRunner through whole turns, in unusual batches.

Each prompt is cut into chunks of unequal sizes, so that most steps mix prefill and decode rows;
blocks are assigned in random order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

import numpy as np
import numpy.typing as npt

from tidegate.engine.execution.runner import Row, RowSampling, Runner

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, index=0)

Chunks = tuple[int, ...]


@dataclass
class DrivenTurn:
    """One turn: its inputs and its samples."""

    prompt: list[int]
    sampling: RowSampling
    chunks: Chunks
    """Sizes of its successive prefill chunks, repeated."""
    adapter: str = ""
    reports_experts: bool = False
    routed_experts: list[npt.NDArray[np.uint8 | np.uint16]] = field(default_factory=list)
    """Those reported with each sampled token."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        return self.prompt + self.sampled


def drive(runner: Runner, turns: Sequence[DrivenTurn], *, new_tokens: int) -> None:
    """Sample ``new_tokens`` for each turn; all begin in the first step."""
    blocks = np.random.default_rng(0).permutation(runner.num_blocks).tolist()
    tables: list[list[int]] = []
    for turn in turns:
        needed = -(-(len(turn.prompt) + new_tokens) // runner.block_tokens)
        tables.append(blocks[:needed])
        del blocks[:needed]
    sizes = [cycle(turn.chunks) for turn in turns]
    computed = [0] * len(turns)
    while running := [n for n, turn in enumerate(turns) if len(turn.sampled) < new_tokens]:
        rows = [_row(turns[n], computed[n], next(sizes[n]), tables[n]) for n in running]
        output = runner.step(rows)
        results = enumerate(zip(output.token_ids.tolist(), output.logprobs.tolist(), strict=True))
        for n, row in zip(running, rows, strict=True):
            computed[n] += len(row.token_ids)
            if row.sampling is not None:
                index, (token_id, logprob) = next(results)
                if index in (experts := output.positions.get("routed_experts", {})):
                    turns[n].routed_experts.append(experts[index])
                turns[n].sampled.append(token_id)
                turns[n].logprobs.append(logprob)


def _row(turn: DrivenTurn, computed: int, chunk: int, table: list[int]) -> Row:
    context = turn.context
    end = min(computed + chunk, len(context))
    sampling = replace(turn.sampling, index=len(turn.sampled)) if end == len(context) else None
    tokens = np.array(context[computed:end], np.int32)
    positions_from = None
    if turn.reports_experts:
        positions_from = computed if turn.sampled else 0
    return Row(
        tokens, computed, table, sampling, adapter=turn.adapter, positions_from=positions_from
    )
