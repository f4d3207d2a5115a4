"""What tokens come out of one engine step? Rows in, one sampled token per sampling row out.

A step mixes rows that decode with rows that prefill a chunk of their context. The runner owns the
memory of the KV cache; which blocks are whose is the scheduler's business, and so is everything a
turn is apart from tokens, positions and sampling.

Letters in shapes: R rows, T tokens of all rows, S sampling rows, B blocks of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.execution.step_layout import BlockTables, RowSizes, StepLayout, padding_kind
from tidegate.engine.models.layer_kinds import LayerKinds, dense_layers
from tidegate.engine.models.model import (
    AttentionPlan,
    DensePlan,
    LayerPlan,
    StepPlan,
    forward,
    head_logits,
)
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights
from tidegate.engine.sampling.sampling import RowSampling as RowSampling
from tidegate.engine.sampling.sampling import StepOutput as StepOutput
from tidegate.engine.sampling.sampling import sample_apart, sample_rows
from tidegate.engine.sampling.scoring import RowScore, RowScoring, score_rows
from tidegate.engine.weights.lora import AdapterTokens
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.kernels.attention import (
    CacheShape,
    Ints,
    RowGroup,
    plan_group,
    scratch_elements,
    write_index,
)
from tidegate.kernels.layers import Layers
from tidegate.kernels.native import LastTokens, Native, Places

ATTENDS_SINGLY = 0
"""The kind of rows whose tokens compiled code computes one by one: first of all kinds."""


@dataclass(slots=True)
class Row:
    """What one turn runs in a step."""

    token_ids: npt.NDArray[np.int32]
    """At least one."""
    start: int
    """Context position of the first of them; the positions before it are in the cache. The last
    must lie below ``config.context_tokens_max``."""
    block_table: list[int]
    """The turn's blocks in the order of positions; enough for its last token, or more."""
    sampling: RowSampling | None
    """None in the middle of a prefill: nothing is sampled."""
    scoring: RowScoring | None = None
    """What is to be told of its tokens; then nothing is sampled."""
    adapter: str = ""
    """One of the weights', by name; empty: none."""


class Runner(Protocol):
    """What computes steps: our own code, or that of transformers."""

    @property
    def num_blocks(self) -> int:
        """How many blocks the KV cache has."""

    @property
    def block_tokens(self) -> int:
        """How many positions a block has."""

    @property
    def weights(self) -> WeightStore:
        """Those that the next step computes with."""

    def swap(self, weights: WeightStore) -> None:
        """Compute with others from the next step on: those of the same model."""

    def cache_tensors(self) -> list[torch.Tensor]:
        """All that the KV is kept in, and nothing that must outlast it."""

    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run every row's tokens, and sample after the last of those that ask for it; score others.

        A row may attend to blocks that rows before it fill in this very step.
        """


def sizes_of(rows: Sequence[Row], kinds: list[int]) -> RowSizes:
    """What the rows' layout follows from, if they are of these kinds."""
    return RowSizes(
        kinds=kinds,
        tokens=[len(row.token_ids) for row in rows],
        samples=[row.sampling is not None for row in rows],
        scored=[0 if row.scoring is None else row.scoring.positions for row in rows],
        adapters=[row.adapter for row in rows],
    )


class ModelRunner:
    """Runs one model on one thread, by our own code."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        num_blocks: int,
        block_tokens: int = 16,
        native: Native | None = None,
        is_deterministic: bool = False,
    ) -> None:
        """``native`` is compiled code that suits the model, to decode by instead of by torch's.

        With ``is_deterministic`` a row's outputs are the same bits whatever rows are beside it, and
        however its context was cut into chunks. That takes compiled code, and packed weights.
        """
        if is_deterministic and (native is None or not weights.is_packed):
            raise ValueError("only compiled code computes the same bits in every batch")
        self.config = config
        self.weights = weights
        """May be replaced between two steps, by weights of the same config and dtype."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._shape = CacheShape(config.num_kv_heads, block_tokens)
        size = (num_blocks, 2, config.num_kv_heads, block_tokens, config.head_dim)
        # Zeros, not whatever memory holds: a masked position is still multiplied, by 0.
        self._caches = [torch.zeros(size, dtype=weights.dtype) for _ in range(config.num_layers)]
        self._scratch = torch.empty(0, dtype=weights.dtype)
        positions = min(config.context_tokens_max, num_blocks * block_tokens)
        self._native = native
        self._is_deterministic = is_deterministic
        self._kinds = LayerKinds(config, positions, weights.dtype)
        self._dense: Layers | None = None
        self._dense_of: Weights | None = None
        """Whose layers those are, if they are any's."""
        self._layout: StepLayout | None = None
        self._tables = BlockTables()

    def swap(self, weights: WeightStore) -> None:
        """Compute with others from the next step on: those of the same model."""
        if not isinstance(weights, Weights):
            raise TypeError(f"weights of {type(self).__name__}, got {type(weights).__name__}")
        self.weights = weights

    def cache_tensors(self) -> list[torch.Tensor]:
        """All that the KV is kept in, and nothing that must outlast it."""
        return [*self._caches, self._scratch]

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run every row's tokens, and sample after the last of those that ask for it; score others.

        A row may attend to blocks that rows before it fill in this very step. Here, because each
        layer writes all keys and values before any row attends.
        """
        if not rows:
            return StepOutput(np.empty(0, np.int32), np.empty(0, np.float32))
        sampling = [row.sampling for row in rows if row.sampling is not None]
        logits, scores = self._compute(rows, len(sampling))
        if logits is None:
            return StepOutput(np.empty(0, np.int32), np.empty(0, np.float32), scores=scores)
        output = self._sample(logits, sampling)
        return replace(output, scores=scores) if scores else output

    @torch.inference_mode()
    def assist(self, rows: Sequence[Row]) -> None:
        """Do this rank's part of a step that another rank samples; for a part of a model only."""
        self._compute(rows, sum(row.sampling is not None for row in rows))

    def _compute(
        self, rows: Sequence[Row], sampled: int
    ) -> tuple[torch.Tensor | None, Sequence[RowScore]]:
        """The logits [S, V] to sample so many rows from, if any, and what is scored."""
        plan = self._plan(rows)
        hidden = forward(self.weights, self._caches, plan)
        scoring = [row.scoring for row in rows if row.scoring is not None]
        scores = score_rows(self.weights, hidden[sampled:], scoring) if scoring else ()
        return head_logits(self.weights, hidden[:sampled]) if sampled else None, scores

    def _sample(self, logits: torch.Tensor, sampling: Sequence[RowSampling]) -> StepOutput:
        if self._is_deterministic:
            assert self._native is not None  # or __init__ refuses
            return sample_apart(logits, sampling, self._native)
        return sample_rows(logits, sampling, self._native)

    def _plan(self, rows: Sequence[Row]) -> StepPlan:
        """Lay the rows' tokens out one after another, rows of like size together."""
        layout = self._layout_of(rows)
        ordered = [rows[n] for n in layout.order]
        starts = np.array([row.start for row in ordered], np.int64)
        tables = self._tables.of([row.block_table for row in ordered])
        positions = starts[layout.row_of_token] + layout.places
        token_ids = np.concatenate([row.token_ids for row in ordered], dtype=np.int64)
        return StepPlan(
            token_ids=torch.from_numpy(token_ids),
            sampled=None if layout.asks_all else layout.asked,
            native=self._native,
            layers=self._dense_plan(layout, positions, tables)
            or self._layer_plan(layout, starts, positions, tables),
        )

    def _dense_plan(self, layout: StepLayout, positions: Ints, tables: Ints) -> DensePlan | None:
        """For a step all of whose tokens attend singly, in a model of dense layers."""
        kinds = {part.kind for part in layout.ranges}
        if self._native is None or layout.adapters or kinds != {ATTENDS_SINGLY}:
            return None
        if self._dense_of is not self.weights:
            self._dense = dense_layers(self.weights, self._caches, self._kinds)
            self._dense_of = self.weights
        if self._dense is None:
            return None
        if not layout.ranges[0].has_single_tokens:
            tables = tables[layout.row_of_token]
        return DensePlan(self._dense, torch.from_numpy(positions), torch.from_numpy(tables))

    def _layer_plan(
        self, layout: StepLayout, starts: Ints, positions: Ints, tables: Ints
    ) -> LayerPlan:
        """For any other."""
        block, offset = np.divmod(positions, self.block_tokens)
        block = tables[layout.row_of_token, block]
        groups = [
            self._groups(layout, starts, positions, tables, window)
            for window in self._kinds.windows
        ]
        places = Places(*map(torch.from_numpy, (positions, block, offset)))
        is_native = self._native is not None
        return LayerPlan(
            attention=self._attention(None if is_native else places.positions, groups),
            places=places,
            write_index=None if is_native else write_index(block, offset, self._shape),
            scratch=self._scratch_for([group for kind in groups for group in kind]),
            native=self._native,
            adapters=[AdapterTokens(self.weights.adapters[n], its) for n, its in layout.adapters],
        )

    def _attention(
        self,
        positions: torch.Tensor | None,
        groups: Sequence[Sequence[RowGroup | LastTokens]],
    ) -> list[AttentionPlan]:
        """Each layer's plan for tokens at ``positions`` [T]; ``groups`` are those of each kind.

        Without positions, with the rotations of all there are.
        """
        plans = [
            AttentionPlan(table if positions is None else table.index_select(0, positions), its)
            for table, its in zip(self._kinds.rotations, groups, strict=True)
        ]
        return [plans[kind] for kind in self._kinds.of_layers]

    def _layout_of(self, rows: Sequence[Row]) -> StepLayout:
        """That of the last step, if these rows have the sizes that those had."""
        sizes = sizes_of(rows, [self._kind(len(row.token_ids), row.start) for row in rows])
        if self._layout is None or self._layout.sizes != sizes:
            self._layout = StepLayout(sizes)
        return self._layout

    def _kind(self, tokens: int, start: int) -> int:
        """Rows of one kind are computed together; compiled code pads nothing where it attends."""
        if self._is_deterministic or (self._native is not None and tokens == 1):
            return ATTENDS_SINGLY
        return padding_kind(tokens, start + tokens)

    def _groups(
        self,
        layout: StepLayout,
        starts: Ints,
        positions: Ints,
        tables: Ints,
        window_tokens: int | None,
    ) -> list[RowGroup | LastTokens]:
        """Rows of each kind, for layers with one kind of window."""
        groups: list[RowGroup | LastTokens] = []
        for part in layout.ranges:
            rows = slice(part.first_row, part.end_row)
            tokens = slice(part.first_token, part.end_token)
            if self._native is not None and part.kind == ATTENDS_SINGLY:
                single = rows if part.has_single_tokens else layout.row_of_token[tokens]
                where, lengths = map(torch.from_numpy, (tables[single], positions[tokens] + 1))
                groups.append(
                    LastTokens(part.first_token, part.end_token, where, lengths, window_tokens)
                )
                continue
            counts = layout.counts[rows]
            blocks = -(-int((starts[rows] + counts).max()) // self.block_tokens)
            groups.append(
                plan_group(
                    starts[rows],
                    counts,
                    tables[rows, :blocks],
                    self._shape,
                    first_token=part.first_token,
                    dtype=self.weights.dtype,
                    window_tokens=window_tokens,
                )
            )
        return groups

    def _scratch_for(self, groups: Sequence[RowGroup | LastTokens]) -> torch.Tensor:
        """The scratch memory, kept from step to step, grown where this one needs more."""
        gathered = [group for group in groups if isinstance(group, RowGroup)]
        needed = scratch_elements(gathered, self._caches[0])
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=self._scratch.dtype)
        return self._scratch
