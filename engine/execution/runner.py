"""Step runner of the CPU: computes one continuous-batching step and samples its tokens.

Implements ``Runner``, as ``device/runner.py`` does for GPUs. A step mixes decode rows and prefill
chunks. The runner owns the KV cache's tensors; the scheduler assigns the blocks. The forward pass
is in ``models/model.py``; compiled kernels are used if they can be built.

Letters in shapes: R rows, T tokens of all rows, S sampling rows, B blocks of a row, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast, overload

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from tidegate.engine.execution.images import RowImage
from tidegate.engine.execution.position_cache import PositionCache, Positions
from tidegate.engine.execution.step_layout import (
    AdapterKey,
    AdapterVersion,
    BlockTables,
    RowSizes,
    StepLayout,
    padding_kind,
)
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
from tidegate.engine.sampling.sampling import (
    Drawn,
    ReportedDraw,
    hidden_rows,
    limits,
    options_of,
    random_numbers,
    sample_rows,
    with_hidden_states,
)
from tidegate.engine.sampling.sampling import RowSampling as RowSampling
from tidegate.engine.sampling.sampling import StepOutput as StepOutput
from tidegate.engine.sampling.scoring import RowScore, RowScoring, score_rows
from tidegate.engine.weights.lora import Adapter, AdapterTokens
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.kernels.attention import (
    CacheShape,
    Ints,
    RowGroup,
    plan_group,
    scratch_elements,
    write_index,
)
from tidegate.kernels.layers import DecodeColumns, Layers
from tidegate.kernels.native import DrawReports, LastTokens, Native, SlotMapping
from tidegate.policies.routing_replay import no_mixture
from tidegate.transport.attachments import AttachmentName

ATTENDS_SINGLY = 0
"""Kind of the rows whose attention compiled code computes token by token; sorts before all padded
kinds."""


CHUNK_TOKENS_MIN = 128
"""Tokens of a prefill chunk from which it attends by itself: one more call costs less there than
the mask of several."""


@dataclass(slots=True)
class Row:
    """One sequence's part of a step: a prefill chunk, a decode or a draft token."""

    token_ids: npt.NDArray[np.int32]
    """[tokens of the row], int32, at least one."""
    start: int
    """Context position of the first token; earlier positions are in the KV cache. The last token's
    position must be below ``config.context_tokens_max``."""
    block_table: list[int]
    """The sequence's KV blocks in the order of positions; they must cover the row's last token."""
    sampling: RowSampling | None
    """How to sample after the last token; None in a prefill chunk that is not the last."""
    scoring: RowScoring | None = None
    """What to score of the row's tokens; a row with ``scoring`` samples nothing."""
    adapter: AdapterKey = ""
    """LoRA adapter to apply; empty for none."""
    positions_from: int | None = None
    """First context position whose attachments to report, up to the row's last, if the row samples.
    Those of the row's own tokens are recorded in any case, for later rows and for turns that share
    their blocks; None records and reports none."""
    images: Sequence[RowImage] = ()
    """Images of the sequence, in order; only for models that read images."""


class DecodeRows(Sequence[Row]):
    """Rows that all decode one token, and are drawn whole (:class:`RowSampling`), also as columns.

    The columns follow the rows from step to step, so that a runner need not read each row. The rows
    are brought up to date when they are read.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        """Each row has one token, ``sampling``, no scoring and no adapter."""
        sampling = [row.sampling for row in rows if row.sampling is not None]
        self.options = options_of(sampling)
        """Options of the rows that have any but temperature, top-k and top-p."""
        self._draw: ReportedDraw | None = None
        self._rows = rows
        self._are_current = True
        self.block_tables = [row.block_table for row in rows]
        """The sequences' KV blocks: the same lists in all steps."""
        self._counters = np.array([[row.start for row in rows], [0] * len(rows)])
        self.columns = DecodeColumns(
            np.concatenate([row.token_ids for row in rows], dtype=np.int64),
            self._counters[0],
            *limits(sampling),
            seeds=np.empty(len(rows), np.uint64),
            draws=self._counters[1].view(np.uint64),
        )
        """The same arrays in all steps."""
        self.columns.seeds[:], self.columns.draws[:] = random_numbers(sampling)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        self._update_rows()
        return self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        self._update_rows()
        return iter(self._rows)

    def draw(self, vocab: int, by: Callable[[DrawReports | None], Drawn]) -> StepOutput:
        """Return the output of a draw ``by`` compiled code, with what the options ask for."""
        if not self.options:
            return StepOutput(*by(None))
        if self._draw is None:
            self._draw = ReportedDraw(self.options, len(self), vocab)
        return self._draw.draw(self._counters[1].tolist(), by)

    def advance(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Continue with the step after this one, in which each row has the token that this one
        sampled, [R]."""
        self.columns.token_ids[:] = token_ids
        self._counters += 1
        self._are_current = False

    def _update_rows(self) -> None:
        if self._are_current:
            return
        self._are_current = True
        token_ids = self.columns.token_ids.astype(np.int32)
        counters = self._counters.tolist()
        for number, (row, start, index) in enumerate(zip(self._rows, *counters, strict=True)):
            assert row.sampling is not None
            row.token_ids = token_ids[number : number + 1]
            row.start = start
            row.sampling.index = index


class AdapterTensors(Protocol):
    """Interface to tensors of adapters with weight versions of their own."""

    def tensors(self, key: AdapterVersion) -> object:
        """Return the tensors of a version in memory."""


class Runner(Protocol):
    """Computes steps and owns the KV cache: on a CPU, on a GPU, or by transformers."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the KV cache."""

    @property
    def block_tokens(self) -> int:
        """Number of positions in a block."""

    @property
    def weights(self) -> WeightStore:
        """The live weights, used by the next step."""

    def swap(self, weights: WeightStore) -> None:
        """Use other weights of the same model from the next step on."""

    def cache_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of KV cache and scratch memory, whose contents sleep may lose."""

    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run each row's tokens; sample after rows with ``sampling``, score rows with ``scoring``.

        A row may attend to blocks that earlier rows of the same step fill.
        """


class WrappedRunner(Runner):
    """A runner for subclasses that add to the steps or swaps of another."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    @override
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    @property
    @override
    def block_tokens(self) -> int:
        return self._runner.block_tokens

    @property
    @override
    def weights(self) -> WeightStore:
        return self._runner.weights

    @override
    def swap(self, weights: WeightStore) -> None:
        self._runner.swap(weights)

    @override
    def cache_tensors(self) -> list[torch.Tensor]:
        return self._runner.cache_tensors()

    @override
    def step(self, rows: Sequence[Row]) -> StepOutput:
        return self._runner.step(rows)


def with_positions(
    output: StepOutput, name: AttachmentName, cache: PositionCache, rows: Sequence[Row]
) -> StepOutput:
    """Attach the entries of an attachment by position that a computed step's rows ask for."""
    requested = {
        number: Positions(row.block_table, row.positions_from, row.start + len(row.token_ids))
        for number, row in enumerate(row for row in rows if row.sampling is not None)
        if row.positions_from is not None
    }
    found = dict(zip(requested, cache.read(list(requested.values())), strict=True))
    return replace(output, positions={**output.positions, name: found}) if found else output


def refused_options(config: ModelConfig) -> Mapping[str, str]:
    """Return the options for attachments that a model cannot make, each with the reason."""
    if any(layer.has_experts for layer in config.layers):
        return {}
    return {"routed_experts": no_mixture(config.architecture)}


def sizes_of(rows: Sequence[Row], kinds: list[int]) -> RowSizes:
    """Return the sizes that the rows' layout depends on; ``kinds`` has one entry per row."""
    return RowSizes(
        kinds=kinds,
        tokens=[len(row.token_ids) for row in rows],
        samples=[row.sampling is not None for row in rows],
        scored=[0 if row.scoring is None else row.scoring.positions for row in rows],
        adapters=[row.adapter for row in rows],
    )


def decode_sizes(rows: int, kind: int) -> RowSizes:
    """Return the sizes of a step of this many :class:`DecodeRows`, all of one kind."""
    return RowSizes([kind] * rows, [1] * rows, [True] * rows, [0] * rows, [""] * rows)


class ModelRunner:
    """Runs one model with Tidegate's own forward pass, on one thread."""

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
        """``native`` is compiled code for the model's decode steps; None uses torch.

        With ``is_deterministic`` a row's outputs have the same bits in every batch and for every
        chunking of its context. That needs compiled code and packed weights.
        """
        if is_deterministic and (native is None or not weights.is_packed):
            raise ValueError(
                "a deterministic engine needs compiled kernels and packed weights; install a C++ "
                "compiler, or leave deterministic out"
            )
        self.config = config
        self.weights = weights
        """Replaced between two steps only, by weights of the same config and dtype."""
        self.adapter_versions: AdapterTensors | None = None
        """Tensors of adapters with weight versions of their own; None if rows have none."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._shape = CacheShape(config.num_kv_heads, block_tokens)
        size = (num_blocks, 2, config.num_kv_heads, block_tokens, config.head_dim)
        # Zeros, because masked positions are multiplied by 0, and NaN * 0 is NaN.
        self._caches = [torch.zeros(size, dtype=weights.dtype) for _ in range(config.num_layers)]
        self._scratch = torch.empty(0, dtype=weights.dtype)
        positions = min(config.context_tokens_max, num_blocks * block_tokens)
        self._native = native
        self._is_deterministic = is_deterministic
        self._needs_mask = config.attention_soft_cap is not None or config.attention_sinks
        self._kinds = LayerKinds(config, positions, weights.dtype)
        self._dense: Layers | None = None
        self._dense_of: Weights | None = None
        """Weights that ``_dense`` was made from; None before the first dense step."""
        self._layout: StepLayout | None = None
        self._tables = BlockTables()
        self._num_mixtures = sum(layer.has_experts for layer in config.layers)
        num_experts = 0 if config.experts is None else config.experts.count
        self._experts = PositionCache(num_blocks, block_tokens, num_experts - 1)

    def swap(self, weights: WeightStore) -> None:
        """Use other weights of the same model from the next step on."""
        if not isinstance(weights, Weights):
            raise TypeError(f"weights of {type(self).__name__}, got {type(weights).__name__}")
        self.weights = weights

    def cache_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the KV cache and the scratch memory."""
        return [*self._caches, self._scratch]

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's KV to another block, in all layers."""
        for cache in self._caches:
            cache[target] = cache[source]

    def step(self, rows: Sequence[Row]) -> StepOutput:
        """Run each row's tokens; sample after rows with ``sampling``, score rows with ``scoring``.

        A row may attend to blocks that earlier rows of the same step fill, because each layer
        writes all keys and values before any row attends.
        """
        if not rows:
            return StepOutput(np.empty(0, np.int32), np.empty(0, np.float32))
        if isinstance(rows, DecodeRows):
            layers = self._dense_layers()
            if layers is not None and layers.decodes:
                tables = self._tables.of(rows.block_tables)
                draw = partial(layers.decode, rows.columns, tables)
                return rows.draw(self.config.vocab_size, draw)
        return self._step(rows)

    @torch.inference_mode()
    def _step(self, rows: Sequence[Row]) -> StepOutput:
        sampling = [row.sampling for row in rows if row.sampling is not None]
        hidden, logits, scores = self._compute(rows, len(sampling))
        if logits is None:
            return StepOutput(np.empty(0, np.int32), np.empty(0, np.float32), scores=scores)
        output = sample_rows(logits, sampling, self._native)
        if reported := hidden_rows(sampling):
            output = with_hidden_states(output, reported, hidden[reported])
        if self._num_mixtures:
            output = with_positions(output, "routed_experts", self._experts, rows)
        return replace(output, scores=scores) if scores else output

    @torch.inference_mode()
    def step_with_logits(self, rows: Sequence[Row]) -> tuple[StepOutput, torch.Tensor]:
        """Run rows as :meth:`step`; return also the sampling rows' logits [S, V], not edited."""
        sampling = [row.sampling for row in rows if row.sampling is not None]
        _, logits, _ = self._compute(rows, len(sampling))
        if logits is None:
            return StepOutput(np.empty(0, np.int32), np.empty(0, np.float32)), torch.empty(0, 0)
        return sample_rows(logits.clone(), sampling, self._native), logits

    @torch.inference_mode()
    def assist(self, rows: Sequence[Row]) -> None:
        """Compute this tensor-parallel rank's part of a step that rank 0 samples."""
        self._compute(rows, sum(row.sampling is not None for row in rows))

    def _compute(
        self, rows: Sequence[Row], sampled: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, Sequence[RowScore]]:
        """Return the normed hidden states [S, H] of the ``sampled`` rows, their logits [S, V], None
        if there are none, and the scores."""
        plan = self._plan(rows)
        hidden = forward(self.weights, self._caches, plan)
        if plan.routed_experts is not None and isinstance(plan.layers, LayerPlan):
            written = plan.layers.slot_mapping
            slots = written.blocks * self.block_tokens + written.offsets
            self._experts.write(slots.numpy(), plan.routed_experts.numpy())
        scoring = [row.scoring for row in rows if row.scoring is not None]
        scores = score_rows(self.weights, hidden[sampled:], scoring) if scoring else ()
        logits = head_logits(self.weights, hidden[:sampled]) if sampled else None
        return hidden[:sampled], logits, scores

    def _plan(self, rows: Sequence[Row]) -> StepPlan:
        """Concatenate the rows' tokens, sorted by kind so that rows of similar
        size are adjacent."""
        if (plan := self._decode_plan(rows)) is not None:
            return plan
        layout = self._layout_of(rows)
        ordered = [rows[n] for n in layout.order]
        starts = np.array([row.start for row in ordered], np.int64)
        tables = self._tables.of([row.block_table for row in ordered])
        positions = starts[layout.row_of_token] + layout.token_indices
        token_ids = np.concatenate([row.token_ids for row in ordered], dtype=np.int64)
        return StepPlan(
            token_ids=torch.from_numpy(token_ids),
            sampled=None if layout.outputs_all_tokens else layout.output_tokens,
            native=self._native,
            layers=self._dense_plan(layout, positions, tables)
            or self._layer_plan(layout, starts, positions, tables),
            routed_experts=self._experts_for(rows, len(token_ids)),
        )

    def _decode_plan(self, rows: Sequence[Row]) -> StepPlan | None:
        """Return the plan of a step in which every row is one token to sample after and one
        compiled call runs all layers; None for other steps.

        Such rows are in the layout's order, so the layout is skipped: it takes as long as the rest
        of the plan.
        """
        layers = self._dense_layers()
        if layers is None or None in [row.sampling for row in rows]:
            return None
        token_ids = np.concatenate([row.token_ids for row in rows], dtype=np.int64)
        if len(token_ids) != len(rows) or any(row.adapter for row in rows):
            return None
        positions = np.array([row.start for row in rows], np.int64)
        tables = self._tables.of([row.block_table for row in rows])
        return StepPlan(
            token_ids=torch.from_numpy(token_ids),
            sampled=None,
            native=self._native,
            layers=DensePlan(layers, torch.from_numpy(positions), torch.from_numpy(tables)),
        )

    def _experts_for(self, rows: Sequence[Row], tokens: int) -> torch.Tensor | None:
        """Return memory for the routed experts of a step's tokens; None if no row asks for them."""
        experts = self.config.experts
        if experts is None or all(row.positions_from is None for row in rows):
            return None
        return torch.empty(tokens, self._num_mixtures, experts.per_token, dtype=torch.long)

    def _dense_plan(self, layout: StepLayout, positions: Ints, tables: Ints) -> DensePlan | None:
        """Return the plan of a step in which compiled code runs all layers in one call;
        None if it cannot."""
        kinds = {part.kind for part in layout.ranges}
        layers = self._dense_layers()
        if layers is None or layout.adapters or kinds != {ATTENDS_SINGLY}:
            return None
        if not layout.ranges[0].has_single_tokens:
            tables = tables[layout.row_of_token]
        return DensePlan(layers, torch.from_numpy(positions), torch.from_numpy(tables))

    def _dense_layers(self) -> Layers | None:
        """Return the live weights' layers as one compiled call; None if no compiled code can run
        all of them."""
        if self._dense_of is not self.weights:
            self._dense_of, self._dense = self.weights, None
            if self._native is not None:
                self._dense = dense_layers(self.weights, self._caches, self._kinds)
        return self._dense

    def _layer_plan(
        self, layout: StepLayout, starts: Ints, positions: Ints, tables: Ints
    ) -> LayerPlan:
        block, offset = np.divmod(positions, self.block_tokens)
        block = tables[layout.row_of_token, block]
        groups = [
            self._groups(layout, starts, positions, tables, window)
            for window in self._kinds.windows
        ]
        slot_mapping = SlotMapping(*map(torch.from_numpy, (positions, block, offset)))
        is_native = self._native is not None
        return LayerPlan(
            attention=self._attention(None if is_native else slot_mapping.positions, groups),
            slot_mapping=slot_mapping,
            write_index=None if is_native else write_index(block, offset, self._shape),
            scratch=self._scratch_for([group for kind in groups for group in kind]),
            native=self._native,
            adapters=[
                AdapterTokens(self._adapter(key), token_indices)
                for key, token_indices in layout.adapters
            ],
        )

    def _adapter(self, key: AdapterKey) -> Adapter:
        if isinstance(key, str):
            return self.weights.adapters[key]
        assert self.adapter_versions is not None
        return cast(Adapter, self.adapter_versions.tensors(key))

    def _attention(
        self,
        positions: torch.Tensor | None,
        groups: Sequence[Sequence[RowGroup | LastTokens]],
    ) -> list[AttentionPlan]:
        """Return each layer's attention plan; ``groups`` has one entry per kind of attention.

        ``positions`` [T] selects rows of the rotary table; None keeps the whole table.
        """
        plans = [
            AttentionPlan(
                table if positions is None else table.index_select(0, positions), kind_groups
            )
            for table, kind_groups in zip(self._kinds.rotations, groups, strict=True)
        ]
        return [plans[kind] for kind in self._kinds.of_layers]

    def _layout_of(self, rows: Sequence[Row]) -> StepLayout:
        """Return the rows' layout: the last step's, if the sizes are equal."""
        sizes = sizes_of(rows, [self._kind(len(row.token_ids), row.start) for row in rows])
        if self._layout is None or self._layout.sizes != sizes:
            self._layout = StepLayout(sizes)
        return self._layout

    def _kind(self, tokens: int, start: int) -> int:
        """Return a row's kind: rows of one kind are padded to each other. Compiled attention
        needs no padding."""
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
        """Return what attention kernels need for layers with this sliding window: a group of rows
        for each way in which rows attend."""
        groups: list[RowGroup | LastTokens] = []
        for part in layout.ranges:
            rows = slice(part.first_row, part.end_row)
            tokens = slice(part.first_token, part.end_token)
            if self._native is not None and part.kind == ATTENDS_SINGLY:
                single = rows if part.has_single_tokens else layout.row_of_token[tokens]
                block_tables, lengths = map(
                    torch.from_numpy, (tables[single], positions[tokens] + 1)
                )
                groups.append(
                    LastTokens(
                        part.first_token, part.end_token, block_tables, lengths, window_tokens
                    )
                )
                continue
            first_token = part.first_token
            for each in self._attending_together(rows, layout.counts[rows]):
                counts = layout.counts[each]
                blocks = -(-int((starts[each] + counts).max()) // self.block_tokens)
                group = plan_group(
                    starts[each],
                    counts,
                    tables[each, :blocks],
                    self._shape,
                    first_token=first_token,
                    dtype=self.weights.dtype,
                    window_tokens=window_tokens,
                    needs_mask=self._needs_mask,
                )
                groups.append(group)
                first_token = group.end_token
        return groups

    def _attending_together(self, rows: slice, counts: Ints) -> list[slice]:
        """Return the rows of one kind in the groups that they attend in: long ones alone, because
        without padding there is no mask."""
        if self._needs_mask or counts.min() < CHUNK_TOKENS_MIN:
            return [rows]
        return [slice(row, row + 1) for row in range(rows.start, rows.stop)]

    def _scratch_for(self, groups: Sequence[RowGroup | LastTokens]) -> torch.Tensor:
        """Return the scratch memory, kept between steps and grown if this step needs more."""
        gathered = [group for group in groups if isinstance(group, RowGroup)]
        needed = scratch_elements(gathered, self._caches[0])
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=self._scratch.dtype)
        return self._scratch
