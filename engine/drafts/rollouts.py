"""Draft tokens from earlier, finished samples of the same prompt.

``--speculative-method rollouts`` selects it. A group samples one prompt several times, and trainers
reuse prompts, so samples repeat much text even under newer weights (SPEC-RL, arXiv:2509.23232). A
sequence follows an earlier sample while their tokens agree, and searches for another matching
n-gram when they diverge.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from tidegate.engine.drafts.lookup import NGRAM_TOKENS, LookupDrafts, Ngram
from tidegate.engine.scheduling.drafts import NO_TOKENS, DraftSource, Tokens
from tidegate.engine.scheduling.sequences import EngineSequence

HELD_TOKENS_MAX = 4 * 1024 * 1024
"""Tokens kept over all prompts' samples, 16 MB; the least recently used prompts are dropped."""

PROMPT_TOKENS, SAMPLE_TOKENS = 96, 32
"""Overhead of a prompt's and a sample's objects, counted in tokens of 4 bytes."""

SAMPLES_MAX = 8
"""Number of samples kept per prompt, the newest ones. Indexing further samples at a sequence's
start takes more time than their drafts save."""


class _PromptSamples:
    """The samples of one prompt, each preceded by the prompt's last tokens."""

    __slots__ = ("dropped", "ends", "followers", "samples")

    def __init__(self) -> None:
        self.samples: list[Tokens] = []
        self.followers = 0
        """Number of sequences that follow these samples now."""
        self.ends: dict[Ngram, tuple[Tokens, int]] = {}
        """The sample and index at which each n-gram ended last. Built on demand, and empty while no
        sequence needs it, because it takes fifty times the memory of the samples."""
        self.dropped = 0
        """Number of dropped samples that ``ends`` still refers to."""

    def add(self, sample: Tokens) -> Tokens | None:
        """Add a sample; drop and return the oldest one if there are more than ``SAMPLES_MAX``."""
        self.samples.append(sample)
        if self.ends:
            self.index(sample)
        if len(self.samples) <= SAMPLES_MAX:
            return None
        self.dropped += 1
        if self.dropped >= SAMPLES_MAX:  # overlapping sequences would otherwise keep it for ever
            self.ends, self.dropped = {}, 0
        return self.samples.pop(0)

    def index(self, sample: Tokens) -> None:
        """Add a sample's n-grams to ``ends``."""
        token_ids: list[int] = sample.tolist()
        ngrams = zip(*(token_ids[first:] for first in range(NGRAM_TOKENS)), strict=False)
        ends = range(NGRAM_TOKENS, len(token_ids))
        self.ends.update({ngram: (sample, end) for ngram, end in zip(ngrams, ends, strict=False)})

    def find(self, ngram: Ngram) -> tuple[Tokens, int] | None:
        """Return the sample that contained this n-gram last, and where it ended."""
        if not self.ends:
            for sample in self.samples:
                self.index(sample)
        return self.ends.get(ngram)


class _Follower:
    """A sequence, and the sample that it currently repeats."""

    __slots__ = ("index", "length", "prompt", "sample")

    def __init__(self, prompt: _PromptSamples) -> None:
        self.prompt = prompt
        self.sample: Tokens | None = None
        self.index = 0
        """Index in ``sample`` of the token that follows the sequence's first ``length`` tokens."""
        self.length = 0
        """Length of the sequence at the last proposal, in tokens."""

    def propose(self, sequence: EngineSequence, count: int) -> Tokens:
        """Return the sample's next tokens, or another sample's if the sequence has diverged."""
        new_tokens = sequence.tokens[self.length : sequence.length]
        if self.sample is not None:
            end = self.index + len(new_tokens)
            if end < len(self.sample) and np.array_equal(self.sample[self.index : end], new_tokens):
                self.index = end
            else:
                self.sample = None
        if self.sample is None:
            ngram = tuple(
                sequence.tokens[max(0, sequence.length - NGRAM_TOKENS) : sequence.length].tolist()
            )
            self.sample, self.index = self.prompt.find(ngram) or (None, 0)
        self.length = sequence.length
        if self.sample is None:
            return NO_TOKENS
        return self.sample[self.index : self.index + count]


class RolloutDrafts(DraftSource):
    """Draft tokens from earlier samples of a sequence's prompt, else from its own context."""

    def __init__(self, held_tokens_max: int = HELD_TOKENS_MAX) -> None:
        self._held_tokens_max = held_tokens_max
        self._held_tokens = 0
        self._prompts: OrderedDict[bytes, _PromptSamples] = OrderedDict()
        """Samples by a hash of the prompt's tokens, least recently used first."""
        self._followers: dict[int, _Follower] = {}
        self._contexts = LookupDrafts()

    def propose(self, sequences: Sequence[EngineSequence], counts: Sequence[int]) -> list[Tokens]:
        """Return, for each sequence, the next tokens of an earlier sample of its prompt."""
        drafts: list[Tokens] = []
        for sequence, count in zip(sequences, counts, strict=True):
            draft = self._follower(sequence).propose(sequence, count)
            drafts.append(draft if len(draft) else self._contexts.propose([sequence], [count])[0])
        return drafts

    def ended(self, sequence: EngineSequence, *, is_whole: bool) -> None:
        """Keep the sequence's output as a sample if it is complete."""
        self._contexts.ended(sequence, is_whole=is_whole)
        follower = self._followers.pop(sequence.handle, None)
        if follower is not None:
            follower.prompt.followers -= 1
            if not follower.prompt.followers:
                follower.prompt.ends = {}
        start = sequence.prompt_tokens - sequence.sampled_before
        if is_whole:
            first = max(0, start - NGRAM_TOKENS)
            self._keep(self._prompt(sequence), sequence.tokens[first : sequence.length].copy())

    def _follower(self, sequence: EngineSequence) -> _Follower:
        follower = self._followers.get(sequence.handle)
        if follower is None:
            follower = self._followers[sequence.handle] = _Follower(self._prompt(sequence))
            follower.prompt.followers += 1
        return follower

    def _prompt(self, sequence: EngineSequence) -> _PromptSamples:
        tokens = sequence.tokens[: sequence.prompt_tokens - sequence.sampled_before]
        key = blake2b(tokens.tobytes(), digest_size=16).digest()
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = _PromptSamples()
            self._held_tokens += PROMPT_TOKENS
        self._prompts.move_to_end(key)
        return prompt

    def _keep(self, prompt: _PromptSamples, sample: Tokens) -> None:
        self._held_tokens += SAMPLE_TOKENS + len(sample)
        dropped = prompt.add(sample)
        if dropped is not None:
            self._held_tokens -= SAMPLE_TOKENS + len(dropped)
        while self._held_tokens > self._held_tokens_max and len(self._prompts) > 1:
            _, oldest = self._prompts.popitem(last=False)
            self._held_tokens -= PROMPT_TOKENS + sum(SAMPLE_TOKENS + len(s) for s in oldest.samples)
