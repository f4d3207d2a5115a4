"""What would a smaller model say? Guesses by one that has the same tokens and costs far less.

It draws by the random numbers that the turn itself will draw by, so that the two agree wherever
their distributions nearly do. Its own KV cache goes along with the tokens that turns really have;
its weights stay those of its directory. Knows no steps of the large model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tidegate.engine.execution.runner import Row, RowSampling, Runner
from tidegate.engine.memory.memory import is_out_of_memory
from tidegate.engine.scheduling.drafts import NO_TOKENS, Tokens
from tidegate.engine.scheduling.kv_cache import KvCache
from tidegate.engine.scheduling.turns import TurnState

CATCH_UP_TOKENS_MAX = 512
"""Of context that the small model has not read yet, per step: no turn waits long for another's."""


@dataclass(slots=True)
class _Drafted:
    """One turn's KV in the small model."""

    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Leading positions whose KV is there."""
    guess: Tokens = field(default_factory=lambda: NO_TOKENS)
    """What was guessed last. Its KV is of use where the turn really said the same."""
    guessed_at: int = 0
    """The position of its first token."""

    def keep_what_was_right(self, turn: TurnState) -> None:
        """Count as computed only KV of tokens that the turn really has, and not the last one's."""
        said = turn.tokens[self.guessed_at : turn.length][: len(self.guess)]
        wrong = np.flatnonzero(said != self.guess[: len(said)])
        if wrong.size:
            self.computed = min(self.computed, self.guessed_at + int(wrong[0]))
        self.computed = min(self.computed, turn.length - 1)
        self.guess = NO_TOKENS


@dataclass(slots=True)
class _Guess:
    """What is guessed for one turn."""

    turn: TurnState
    drafted: _Drafted
    tokens: Tokens
    """[count]; those guessed so far come first."""
    count: int = 0

    @property
    def is_full(self) -> bool:
        return self.count == len(self.tokens)

    def next_row(self) -> Row:
        """What is not computed yet of the turn and the guess, sampled after."""
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
        """The small model's next token."""
        self.tokens[self.count] = token_id
        self.count += 1
        if self.is_full:
            self.drafted.guess, self.drafted.guessed_at = self.tokens, self.turn.length

    def give_up(self) -> None:
        """Guess nothing, and have what may not have been computed be computed again."""
        self.tokens = NO_TOKENS
        self.drafted.guess, self.drafted.computed = NO_TOKENS, 0


class ModelDrafts:
    """Guesses by a model of one's own choice, run by ``runner``."""

    def __init__(self, runner: Runner, context_tokens_max: int) -> None:
        self._runner = runner
        self._context_tokens_max = context_tokens_max
        self._cache = KvCache(runner.num_blocks)
        self._turns: dict[int, _Drafted] = {}

    def propose(self, turns: Sequence[TurnState], counts: Sequence[int]) -> list[Tokens]:
        """For each turn, what the small model draws; nothing where it is behind, or has no room."""
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
            for guess in guesses:  # the model itself may still have enough to go on without
                guess.give_up()
        return [guess.tokens for guess in guesses]

    def _compute(self, guesses: Sequence[_Guess], behind: list[Row]) -> None:
        """Read on where that is due, and guess token by token."""
        while True:
            growing = [guess for guess in guesses if not guess.is_full]
            if not growing and not behind:
                return
            rows = [guess.next_row() for guess in growing]
            sampled = self._runner.step([*rows, *behind]).token_ids.tolist()
            behind = []
            for guess, token_id in zip(growing, sampled, strict=True):
                guess.add(token_id)

    def ended(self, turn: TurnState, *, is_whole: bool) -> None:
        """Give up the turn's KV."""
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

    def _catch_up(self, turn: TurnState, drafted: _Drafted, tokens_left: int) -> list[Row]:
        """Read on in the turn's context, and sample nothing."""
        if not tokens_left:
            return []
        start, end = drafted.computed, drafted.computed + tokens_left
        drafted.computed = end
        return [Row(turn.tokens[start:end], start, drafted.blocks, None)]
