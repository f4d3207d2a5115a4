"""Draft tokens from a smaller model with the same vocabulary.

The ``draft:DIRECTORY`` source of ``--speculative-method``, called by the scheduler through
``DraftSource``. The draft model samples with the random numbers that the turn itself will use, so
the two agree wherever their distributions are close. It has its own KV cache, kept in step with the
turns' tokens. Its weights stay those of its directory, whatever versions are published.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tidegate.engine.execution.runner import Row, RowSampling, Runner
from tidegate.engine.memory.out_of_memory import is_out_of_memory
from tidegate.engine.scheduling.drafts import NO_TOKENS, Tokens
from tidegate.engine.scheduling.kv_cache import KvCache
from tidegate.engine.scheduling.sequences import EngineSequence

CATCH_UP_TOKENS_MAX = 512
"""Context tokens that the draft model prefills per step, so that no turn waits
long for another's."""


@dataclass(slots=True)
class _Drafted:
    """One turn's KV in the draft model."""

    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Number of leading positions whose KV is computed."""
    guess: Tokens = field(default_factory=lambda: NO_TOKENS)
    """The last draft; its KV is reused as far as the draft was accepted."""
    guessed_at: int = 0
    """Position of the last draft's first token."""

    def keep_what_was_right(self, turn: EngineSequence) -> None:
        """Lower ``computed`` to the positions that match the turn's tokens but the last."""
        said = turn.tokens[self.guessed_at : turn.length][: len(self.guess)]
        wrong = np.flatnonzero(said != self.guess[: len(said)])
        if wrong.size:
            self.computed = min(self.computed, self.guessed_at + int(wrong[0]))
        self.computed = min(self.computed, turn.length - 1)
        self.guess = NO_TOKENS


@dataclass(slots=True)
class _Guess:
    """The draft under way for one turn."""

    turn: EngineSequence
    drafted: _Drafted
    tokens: Tokens
    """[count asked for], int32; only the first ``count`` are filled."""
    count: int = 0

    @property
    def is_full(self) -> bool:
        return self.count == len(self.tokens)

    def next_row(self) -> Row:
        """Return the row of the tokens without KV yet, sampled after the last."""
        turn, drafted = self.turn, self.drafted
        if self.count:
            ids = self.tokens[self.count - 1 : self.count]
        else:
            ids = turn.tokens[drafted.computed : turn.length]
        index = turn.sampled_before + turn.output_tokens + self.count
        sampling: RowSampling = replace(turn.sampling, index=index)
        row = Row(ids, drafted.computed, drafted.blocks, sampling)
        drafted.computed += len(ids)
        return row

    def add(self, token_id: int) -> None:
        """Append a token that the draft model sampled."""
        self.tokens[self.count] = token_id
        self.count += 1
        if self.is_full:
            self.drafted.guess, self.drafted.guessed_at = self.tokens, self.turn.length

    def give_up(self) -> None:
        """Discard the draft, and recompute the turn's KV next time."""
        self.tokens = NO_TOKENS
        self.drafted.guess, self.drafted.computed = NO_TOKENS, 0


class ModelDrafts:
    """Draft tokens sampled from the model that ``runner`` runs."""

    def __init__(self, runner: Runner, context_tokens_max: int) -> None:
        self._runner = runner
        self._context_tokens_max = context_tokens_max
        self._cache = KvCache(runner.num_blocks)
        self._turns: dict[int, _Drafted] = {}

    def propose(self, turns: Sequence[EngineSequence], counts: Sequence[int]) -> list[Tokens]:
        """Return each turn's draft; empty while its prefill lags or no KV block is free."""
        tokens_left = CATCH_UP_TOKENS_MAX
        guesses: list[_Guess] = []
        behind: list[Row] = []
        for turn, count in zip(turns, counts, strict=True):
            drafted = self._turns.setdefault(turn.handle, _Drafted())
            drafted.keep_what_was_right(turn)
            missing = turn.length - drafted.computed
            if not self._has_room(drafted, turn.length + count):
                count = 0
            elif missing > tokens_left:
                behind += self._catch_up(turn, drafted, tokens_left)
                count = tokens_left = 0
            else:
                tokens_left -= missing
            guesses.append(_Guess(turn, drafted, np.empty(count, np.int32)))
        try:
            self._compute(guesses, behind)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            for guess in guesses:  # the large model may still have enough memory without drafts
                guess.give_up()
        return [guess.tokens for guess in guesses]

    def _compute(self, guesses: Sequence[_Guess], behind: list[Row]) -> None:
        """Prefill the rows ``behind``, and sample the drafts token by token."""
        while True:
            growing = [guess for guess in guesses if not guess.is_full]
            if not growing and not behind:
                return
            rows = [guess.next_row() for guess in growing]
            sampled = self._runner.step([*rows, *behind]).token_ids.tolist()
            behind = []
            for guess, token_id in zip(growing, sampled, strict=True):
                guess.add(token_id)

    def ended(self, turn: EngineSequence, *, is_whole: bool) -> None:
        """Release the turn's KV."""
        drafted = self._turns.pop(turn.handle, None)
        if drafted is not None:
            self._cache.release(drafted.blocks)

    def _has_room(self, drafted: _Drafted, tokens: int) -> bool:
        if tokens > self._context_tokens_max:
            return False
        missing = -(-tokens // self._runner.block_tokens) - len(drafted.blocks)
        blocks = self._cache.allocate(max(0, missing))
        drafted.blocks += blocks or []
        return blocks is not None

    def _catch_up(self, turn: EngineSequence, drafted: _Drafted, tokens_left: int) -> list[Row]:
        """Return a prefill chunk of the turn's context, without sampling."""
        if not tokens_left:
            return []
        start, end = drafted.computed, drafted.computed + tokens_left
        drafted.computed = end
        return [Row(turn.tokens[start:end], start, drafted.blocks, None)]
