"""Draft tokens from a smaller model with the same vocabulary.

``--speculative-method draft:DIRECTORY`` selects it. The draft model samples with the random numbers
that the sequence itself will use, so the two agree wherever their distributions are close. It has
its own KV cache, kept in step with the sequences' tokens. Its weights are the directory's until a
version brings others: they are part of the served model's weights, which staging fills and swaps,
and sleep releases.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from typing_extensions import override

from tidegate.engine.execution.runner import Row, RowSampling, Runner, WrappedRunner
from tidegate.engine.memory.out_of_memory import is_out_of_memory
from tidegate.engine.scheduling.drafts import NO_TOKENS, DraftSource, Tokens
from tidegate.engine.scheduling.kv_cache import KvCache
from tidegate.engine.scheduling.sequences import EngineSequence

CATCH_UP_TOKENS_MAX = 512
"""Context tokens that the draft model prefills per step, so that no sequence waits
long for another's."""


@dataclass(slots=True)
class _DraftState:
    """One sequence's KV in the draft model."""

    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Number of leading positions whose KV is computed."""
    draft: Tokens = field(default_factory=lambda: NO_TOKENS)
    """Tokens of the last draft; their KV is reused as far as the draft was accepted."""
    draft_start: int = 0
    """Position of the last draft's first token."""

    def keep_accepted(self, sequence: EngineSequence) -> None:
        """Lower ``computed`` to the positions whose tokens match the sequence's, without its last
        token."""
        actual = sequence.tokens[self.draft_start : sequence.length][: len(self.draft)]
        mismatches = np.flatnonzero(actual != self.draft[: len(actual)])
        if mismatches.size:
            self.computed = min(self.computed, self.draft_start + int(mismatches[0]))
        self.computed = min(self.computed, sequence.length - 1)
        self.draft = NO_TOKENS

    def forget_kv(self) -> None:
        """Recompute the KV next time."""
        self.draft, self.computed = NO_TOKENS, 0


@dataclass(slots=True)
class _PendingDraft:
    """The draft under way for one sequence."""

    sequence: EngineSequence
    state: _DraftState
    tokens: Tokens
    """[requested count], int32; only the first ``count`` are filled."""
    count: int = 0

    @property
    def is_complete(self) -> bool:
        return self.count == len(self.tokens)

    def next_row(self) -> Row:
        """Return the row of the tokens without KV yet, sampled after the last."""
        sequence, state = self.sequence, self.state
        if self.count:
            ids = self.tokens[self.count - 1 : self.count]
        else:
            ids = sequence.tokens[state.computed : sequence.length]
        index = sequence.sampled_before + sequence.output_tokens + self.count
        sampling: RowSampling = replace(sequence.sampling, index=index)
        row = Row(ids, state.computed, state.blocks, sampling)
        state.computed += len(ids)
        return row

    def add(self, token_id: int) -> None:
        """Append a token that the draft model sampled; a stop token ends the draft before it,
        because nothing is sampled after it."""
        if token_id in self.sequence.stop_ids:
            self.tokens = self.tokens[: self.count]
        else:
            self.tokens[self.count] = token_id
            self.count += 1
        if self.is_complete:
            self.state.draft, self.state.draft_start = self.tokens, self.sequence.length

    def discard(self) -> None:
        """Discard the draft, and recompute the sequence's KV next time."""
        self.tokens = NO_TOKENS
        self.state.forget_kv()


class ModelDrafts(DraftSource):
    """Draft tokens sampled from the model that ``runner`` runs."""

    def __init__(self, runner: Runner, context_tokens_max: int, served: Runner) -> None:
        """``served`` runs the served model, with whose weights those of ``runner`` are swapped."""
        self._runner = runner
        self._context_tokens_max = context_tokens_max
        self._served = served
        self._version = 0
        """Version that brought the weights by which the KV was computed."""
        self._cache = KvCache(runner.num_blocks)
        self._states: dict[int, _DraftState] = {}

    @property
    def sleeping_runner(self) -> Runner:
        """The served model's runner with the memory of both models, for sleep."""
        return _RunnerOfBoth(self._served, self._runner)

    def propose(self, sequences: Sequence[EngineSequence], counts: Sequence[int]) -> list[Tokens]:
        """Return each sequence's draft; empty while its prefill lags or no KV block is free."""
        self._follow()
        tokens_left = CATCH_UP_TOKENS_MAX
        drafts: list[_PendingDraft] = []
        catch_up_rows: list[Row] = []
        for sequence, count in zip(sequences, counts, strict=True):
            state = self._states.setdefault(sequence.handle, _DraftState())
            state.keep_accepted(sequence)
            missing = sequence.length - state.computed
            if not self._allocate(state, sequence.length + count):
                count = 0
            elif missing > tokens_left:
                catch_up_rows += self._catch_up(sequence, state, tokens_left)
                count = tokens_left = 0
            else:
                tokens_left -= missing
            drafts.append(_PendingDraft(sequence, state, np.empty(count, np.int32)))
        try:
            self._compute(drafts, catch_up_rows)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            for draft in drafts:  # the served model may still have enough memory without drafts
                draft.discard()
        return [draft.tokens for draft in drafts]

    def _follow(self) -> None:
        """Use the draft weights of the served model's live version, and no KV of other ones."""
        live = self._served.weights
        if live.draft is not None and live.draft is not self._runner.weights:
            self._runner.swap(live.draft)
        if live.draft_version != self._version:
            self._version = live.draft_version
            self.forget_kv()

    def forget_kv(self) -> None:
        """Recompute all KV."""
        for state in self._states.values():
            state.forget_kv()

    def _compute(self, drafts: Sequence[_PendingDraft], catch_up_rows: list[Row]) -> None:
        """Prefill the rows ``catch_up_rows``, and sample the drafts token by token."""
        while True:
            unfinished = [draft for draft in drafts if not draft.is_complete]
            if not unfinished and not catch_up_rows:
                return
            rows = [draft.next_row() for draft in unfinished]
            sampled = self._runner.step([*rows, *catch_up_rows]).token_ids.tolist()
            catch_up_rows = []
            for draft, token_id in zip(unfinished, sampled, strict=True):
                draft.add(token_id)

    def ended(self, sequence: EngineSequence, *, is_whole: bool) -> None:
        """Release the sequence's KV."""
        state = self._states.pop(sequence.handle, None)
        if state is not None:
            self._cache.release(state.blocks)

    def _allocate(self, state: _DraftState, tokens: int) -> bool:
        if tokens > self._context_tokens_max:
            return False
        missing = -(-tokens // self._runner.block_tokens) - len(state.blocks)
        blocks = self._cache.allocate(max(0, missing))
        state.blocks += blocks or []
        return blocks is not None

    def _catch_up(
        self, sequence: EngineSequence, state: _DraftState, tokens_left: int
    ) -> list[Row]:
        """Return a prefill chunk of the sequence's context, without sampling."""
        if not tokens_left:
            return []
        start, end = state.computed, state.computed + tokens_left
        state.computed = end
        return [Row(sequence.tokens[start:end], start, state.blocks, None)]


class _RunnerOfBoth(WrappedRunner):
    """Runner of the served model, with the draft model's KV cache beside its own."""

    def __init__(self, runner: Runner, draft: Runner) -> None:
        super().__init__(runner)
        self._draft = draft

    @override
    def cache_tensors(self) -> list[torch.Tensor]:
        return [*super().cache_tensors(), *self._draft.cache_tensors()]
