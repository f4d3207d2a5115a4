"""Draft tokens from earlier, finished samples of the same prompt.

The ``rollouts`` source of ``--speculative-method``, called by the scheduler. A group samples one
prompt many times, and trainers return to prompts, so much text repeats, even under newer weights
(SPEC-RL, arXiv:2509.23232). A turn follows an earlier sample while their tokens agree, and searches
for another matching n-gram when they diverge.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from tidegate.engine.drafts.lookup import NGRAM_TOKENS, LookupDrafts, Ngram
from tidegate.engine.scheduling.drafts import NO_TOKENS, Tokens
from tidegate.engine.scheduling.sequences import EngineSequence

KEPT_TOKENS_MAX = 4 * 1024 * 1024
"""Tokens kept over all prompts' samples, 16 MB; the least recently used prompts are dropped."""

PROMPT_TOKENS, SAMPLE_TOKENS = 96, 32
"""Overhead of a prompt's and a sample's objects, counted in tokens of 4 bytes."""

SAMPLES_MAX = 8
"""Samples kept per prompt, the latest. More cost more at a turn's start than they help."""


class _PromptSamples:
    """The samples of one prompt, each preceded by the prompt's last tokens."""

    __slots__ = ("ends", "forgotten", "samples", "turns")

    def __init__(self) -> None:
        self.samples: list[Tokens] = []
        self.turns = 0
        """Number of turns that follow these samples now."""
        self.ends: dict[Ngram, tuple[Tokens, int]] = {}
        """Where each n-gram ended last. Built on demand, and empty while no turn needs it, because
        it takes fifty times the memory of the samples."""
        self.forgotten = 0
        """Number of dropped samples that ``ends`` still refers to."""

    def add(self, sample: Tokens) -> Tokens | None:
        """Keep a sample; return the oldest one if it is dropped for it."""
        self.samples.append(sample)
        if self.ends:
            self.index(sample)
        if len(self.samples) <= SAMPLES_MAX:
            return None
        self.forgotten += 1
        if self.forgotten >= SAMPLES_MAX:  # overlapping turns would otherwise keep it for ever
            self.ends, self.forgotten = {}, 0
        return self.samples.pop(0)

    def index(self, sample: Tokens) -> None:
        """Add a sample's n-grams to ``ends``."""
        known: list[int] = sample.tolist()
        runs = zip(*(known[first:] for first in range(NGRAM_TOKENS)), strict=False)
        ends = range(NGRAM_TOKENS, len(known))
        self.ends.update({run: (sample, end) for run, end in zip(runs, ends, strict=False)})

    def find(self, run: Ngram) -> tuple[Tokens, int] | None:
        """Return the sample that contained this n-gram last, and where it ended."""
        if not self.ends:
            for sample in self.samples:
                self.index(sample)
        return self.ends.get(run)


class _Follower:
    """A turn, and the sample that it currently repeats."""

    __slots__ = ("length", "place", "prompt", "sample")

    def __init__(self, prompt: _PromptSamples) -> None:
        self.prompt = prompt
        self.sample: Tokens | None = None
        self.place = 0
        """Index in ``sample`` that corresponds to position ``length`` of the turn."""
        self.length = 0

    def propose(self, turn: EngineSequence, count: int) -> Tokens:
        """Return the sample's next tokens; of another sample if the turn has diverged from it."""
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
    """Draft tokens from earlier samples of a turn's prompt, else from its own context."""

    def __init__(self, kept_tokens_max: int = KEPT_TOKENS_MAX) -> None:
        self._kept_tokens_max = kept_tokens_max
        self._kept_tokens = 0
        self._prompts: OrderedDict[bytes, _PromptSamples] = OrderedDict()
        """Samples by a hash of the prompt's tokens, least recently used first."""
        self._followers: dict[int, _Follower] = {}
        self._contexts = LookupDrafts()

    def propose(self, turns: Sequence[EngineSequence], counts: Sequence[int]) -> list[Tokens]:
        """Return, for each turn, the next tokens of an earlier sample of its prompt."""
        drafts: list[Tokens] = []
        for turn, count in zip(turns, counts, strict=True):
            draft = self._follower(turn).propose(turn, count)
            drafts.append(draft if len(draft) else self._contexts.propose([turn], [count])[0])
        return drafts

    def ended(self, turn: EngineSequence, *, is_whole: bool) -> None:
        """Keep the turn's output as a sample if it is complete."""
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

    def _follower(self, turn: EngineSequence) -> _Follower:
        follower = self._followers.get(turn.handle)
        if follower is None:
            follower = self._followers[turn.handle] = _Follower(self._prompt(turn))
            follower.prompt.turns += 1
        return follower

    def _prompt(self, turn: EngineSequence) -> _PromptSamples:
        tokens = turn.tokens[: turn.prompt_tokens - turn.sampled_before]
        key = blake2b(tokens.tobytes(), digest_size=16).digest()
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = _PromptSamples()
            self._kept_tokens += PROMPT_TOKENS
        self._prompts.move_to_end(key)
        return prompt

    def _keep(self, prompt: _PromptSamples, sample: Tokens) -> None:
        self._kept_tokens += SAMPLE_TOKENS + len(sample)
        forgotten = prompt.add(sample)
        if forgotten is not None:
            self._kept_tokens -= SAMPLE_TOKENS + len(forgotten)
        while self._kept_tokens > self._kept_tokens_max and len(self._prompts) > 1:
            _, oldest = self._prompts.popitem(last=False)
            self._kept_tokens -= PROMPT_TOKENS + sum(SAMPLE_TOKENS + len(s) for s in oldest.samples)
