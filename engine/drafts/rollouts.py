"""What did earlier samples of the same prompt say? Guesses from those that have ended.

A trainer comes back to its prompts, and a group samples one many times: much of what is said is
said again, under newer weights too (SPEC-RL, arXiv 2509.23232). A turn follows an earlier one while
it says the same, and looks for where it may go on once they part. Knows no weights.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from tidegate.engine.drafts.lookup import NGRAM_TOKENS, LookupDrafts, Ngram
from tidegate.engine.scheduling.drafts import NO_TOKENS, Tokens
from tidegate.engine.scheduling.turns import TurnState

KEPT_TOKENS_MAX = 4 * 1024 * 1024
"""Of all prompts' samples, 16 MB; those of the prompts asked for longest ago are forgotten."""

PROMPT_TOKENS, SAMPLE_TOKENS = 96, 32
"""What the objects of each take beside its tokens, in tokens of four bytes."""

SAMPLES_MAX = 8
"""Of one prompt, the latest. More are more work when a turn begins than they are help."""


class _Prompt:
    """The samples of one prompt, each after the prompt's last tokens."""

    __slots__ = ("ends", "forgotten", "samples", "turns")

    def __init__(self) -> None:
        self.samples: list[Tokens] = []
        self.turns = 0
        """Those that follow them now."""
        self.ends: dict[Ngram, tuple[Tokens, int]] = {}
        """Where each run of tokens ended last; empty while no turn needs it, for it takes fifty
        times the room of the samples."""
        self.forgotten = 0
        """Samples that are in ``ends`` still."""

    def add(self, sample: Tokens) -> Tokens | None:
        """Keep a sample; return the one that makes place for it, if any has to."""
        self.samples.append(sample)
        if self.ends:
            self.index(sample)
        if len(self.samples) <= SAMPLES_MAX:
            return None
        self.forgotten += 1
        if self.forgotten >= SAMPLES_MAX:  # where turns overlap, one always needs it
            self.ends, self.forgotten = {}, 0
        return self.samples.pop(0)

    def index(self, sample: Tokens) -> None:
        """Have ``find`` find what followed in this sample."""
        known: list[int] = sample.tolist()
        runs = zip(*(known[first:] for first in range(NGRAM_TOKENS)), strict=False)
        ends = range(NGRAM_TOKENS, len(known))
        self.ends.update({run: (sample, end) for run, end in zip(runs, ends, strict=False)})

    def find(self, run: Ngram) -> tuple[Tokens, int] | None:
        """The sample that had these tokens last, and where they ended."""
        if not self.ends:
            for sample in self.samples:
                self.index(sample)
        return self.ends.get(run)


class _Follower:
    """A turn, and the sample that it says again."""

    __slots__ = ("length", "place", "prompt", "sample")

    def __init__(self, prompt: _Prompt) -> None:
        self.prompt = prompt
        self.sample: Tokens | None = None
        self.place = 0
        """In the sample, of what corresponds to position ``length`` of the turn."""
        self.length = 0

    def propose(self, turn: TurnState, count: int) -> Tokens:
        """What the sample says next, or another where the turn has parted from it."""
        said = turn.tokens[self.length : turn.length]
        if self.sample is not None:
            end = self.place + len(said)
            if end < len(self.sample) and np.array_equal(self.sample[self.place : end], said):
                self.place = end
            else:
                self.sample = None
        if self.sample is None:
            run = tuple(turn.tokens[max(0, turn.length - NGRAM_TOKENS) : turn.length].tolist())
            self.sample, self.place = self.prompt.find(run) or (None, 0)
        self.length = turn.length
        if self.sample is None:
            return NO_TOKENS
        return self.sample[self.place : self.place + count]


class RolloutDrafts:
    """Guesses from earlier samples of turns' prompts; where there are none, from their contexts."""

    def __init__(self, kept_tokens_max: int = KEPT_TOKENS_MAX) -> None:
        self._kept_tokens_max = kept_tokens_max
        self._kept_tokens = 0
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        """By a hash of their tokens, asked for longest ago first."""
        self._followers: dict[int, _Follower] = {}
        self._contexts = LookupDrafts()

    def propose(self, turns: Sequence[TurnState], counts: Sequence[int]) -> list[Tokens]:
        """For each turn, what an earlier sample of its prompt says where it is now."""
        drafts: list[Tokens] = []
        for turn, count in zip(turns, counts, strict=True):
            draft = self._follower(turn).propose(turn, count)
            drafts.append(draft if len(draft) else self._contexts.propose([turn], [count])[0])
        return drafts

    def ended(self, turn: TurnState, *, is_whole: bool) -> None:
        """Keep what the turn has said, if that is all of it."""
        self._contexts.ended(turn, is_whole=is_whole)
        follower = self._followers.pop(turn.handle, None)
        if follower is not None:
            follower.prompt.turns -= 1
            if not follower.prompt.turns:
                follower.prompt.ends = {}
        start = turn.prompt_tokens - turn.sampled_before
        if is_whole:
            first = max(0, start - NGRAM_TOKENS)
            self._keep(self._prompt(turn), turn.tokens[first : turn.length].copy())

    def _follower(self, turn: TurnState) -> _Follower:
        follower = self._followers.get(turn.handle)
        if follower is None:
            follower = self._followers[turn.handle] = _Follower(self._prompt(turn))
            follower.prompt.turns += 1
        return follower

    def _prompt(self, turn: TurnState) -> _Prompt:
        tokens = turn.tokens[: turn.prompt_tokens - turn.sampled_before]
        key = blake2b(tokens.tobytes(), digest_size=16).digest()
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = _Prompt()
            self._kept_tokens += PROMPT_TOKENS
        self._prompts.move_to_end(key)
        return prompt

    def _keep(self, prompt: _Prompt, sample: Tokens) -> None:
        self._kept_tokens += SAMPLE_TOKENS + len(sample)
        forgotten = prompt.add(sample)
        if forgotten is not None:
            self._kept_tokens -= SAMPLE_TOKENS + len(forgotten)
        while self._kept_tokens > self._kept_tokens_max and len(self._prompts) > 1:
            _, oldest = self._prompts.popitem(last=False)
            self._kept_tokens -= PROMPT_TOKENS + sum(SAMPLE_TOKENS + len(s) for s in oldest.samples)
