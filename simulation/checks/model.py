"""Hash in place of a model: each token depends exactly on the inputs that should determine it.

Simulated engines sample from it, and the oracle samples again. A sampled token depends on the
turn's seed, its index, the weights that sampled it, and on every token of its context together with
the weights that computed that token's KV. So a tag that is off by one version, one position or one
engine is detected by computing the token again.
"""

from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol

from tidegate.orchestrator.core.provenance import KvRange, TurnPrefill
from tidegate.orchestrator.core.rollout import Turn
from tidegate.transport.messages import KvSpan, SubmitTurn

STOP_TOKEN = 1
"""Token that ends a turn."""

VOCAB_SIZE = 1 << 24
"""Large, so that a wrong tag passes by chance once in 16 million tokens."""

TORN_WEIGHTS = -1
"""Content of weights that were overwritten during their copy; whole weights count from 0."""

SHORTEST_OUTPUT_TOKENS = 3
"""Minimum of the Pareto distribution from which a turn's output length is drawn, in tokens."""

TAIL_EXPONENT = 0.8
"""Pareto exponent 1/alpha: alpha = 1.25, mean 15 tokens, and 1 in 100 turns longer than 119."""

_BITS = (1 << 64) - 1


def absorb(state: int, token: int, content: int) -> int:
    """Return a context's state after one more position, with KV of the weights ``content``."""
    x = (state ^ (token * 0x9E3779B97F4A7C15 + content * 0xC2B2AE3D27D4EB4F + 1)) & _BITS
    x = (x * 0xBF58476D1CE4E5B9) & _BITS
    return x ^ (x >> 29)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token, and the log-probability that its engine reports."""

    token: int
    logprob: float
    """Log-probability: a multiple of 1/1024, which float32 holds exactly."""


def sample(state: int, *, seed: int, index: int, content: int, engine: str) -> Sampled:
    """Sample output token ``index`` of a turn with the weights ``content`` after ``state``."""
    x = absorb(absorb(state, seed, content), index, content)
    logprob = -((x >> 40) % 4096 + _engine_offset(engine)) / 1024
    if index + 1 >= output_tokens(seed):
        return Sampled(STOP_TOKEN, logprob)
    return Sampled(2 + x % (VOCAB_SIZE - 2), logprob)


@cache
def _engine_offset(engine: str) -> int:
    """Return an engine's offset in log-probs, because ``hash(str)`` differs between processes."""
    return sum(engine.encode()) * 4096


@lru_cache(maxsize=1024)
def output_tokens(seed: int) -> int:
    """Return the output length of a turn that is not cut off, Pareto-distributed over seeds."""
    chance = ((seed * 0x9E3779B97F4A7C15 & _BITS) >> 11) / (1 << 53)
    return int(SHORTEST_OUTPUT_TOKENS * (1.0 - chance) ** -TAIL_EXPONENT)


def check_turn(
    turn: Turn,
    content_of: Callable[[int], int] = int,
    *,
    without_prefills: Collection[str] = (),
) -> None:
    """Compute every token of a turn again from its provenance tag, and compare.

    ``content_of`` maps a version to its weight content; by default both numbers are equal.
    ``without_prefills``: engines that don't report which versions computed the KV. Tokens of these
    engines can't be computed, and must be tagged without a KV range.

    Raises:
        AssertionError: a tag, a token or a log-probability is wrong.
    """
    length = min(output_tokens(turn.sampling.seed), turn.sampling.max_tokens)
    is_whole = turn.length == length or (turn.finish_reason == "cancelled" and turn.length < length)
    assert is_whole, f"{turn.length} tokens of {length}, {turn.finish_reason}"
    turn.settle()
    context, logprobs = turn.filed_token_ids, turn.filed_logprobs
    prefills = {prefill.at: prefill for prefill in turn.prefills}
    state, kv, engine = 0, KvRange(0, 0), ""
    for index, tag in enumerate(_tags(turn)):
        position = turn.start + index
        content = content_of(tag.version)
        if index in prefills:
            state, kv = _prefilled_state(prefills[index], context[:position], content_of)
            assert kv == KvRange(min(kv.oldest, tag.version), max(kv.newest, tag.version)), tag
        elif tag.engine in without_prefills:
            assert tag.kv is None, f"{tag.engine} does not say whose KV it was, but the tag: {tag}"
            engine = tag.engine
            continue
        else:
            assert tag.engine == engine, f"{tag.engine} continued without a prefill"
            state = absorb(state, context[position - 1], content)
            kv = KvRange(min(kv.oldest, tag.version), max(kv.newest, tag.version))
        engine = tag.engine
        expected = sample(
            state, seed=turn.sampling.seed, index=index, content=content, engine=engine
        )
        actual = Sampled(context[position], logprobs[position])
        if expected != actual or tag.kv != kv:
            token = f"rollout {turn.rollout_id}, output token {index}"
            raise AssertionError(
                f"{token} tagged {tag} would be {expected} with KV of {kv}, but it is {actual}"
            )


@dataclass(frozen=True, slots=True)
class _Tag:
    """Provenance that the run has recorded for one token."""

    version: int
    engine: str
    kv: KvRange | None


def _tags(turn: Turn) -> Iterator[_Tag]:
    """Yield one tag per output token, and check that the spans leave no gap."""
    end = 0
    for span in turn.spans():
        assert span.start == end < span.end, f"a gap before {span}, after {end}"
        end = span.end
        tag = _Tag(span.version, span.engine, span.kv)
        for _ in range(span.start, span.end):
            yield tag
    assert end == turn.length, f"spans end at {end} of {turn.length} tokens"


def _prefilled_state(
    prefill: TurnPrefill, context: "array[int]", content_of: Callable[[int], int]
) -> tuple[int, KvRange]:
    """Return the state and KV version range of a context prefilled as ``prefill`` says."""
    state = end = 0
    for span in prefill.spans:
        assert span.start == end < span.end, f"a gap in {prefill}"
        end = span.end
        content = content_of(span.version)
        for token in context[span.start : span.end]:
            state = absorb(state, token, content)
    assert end == len(context), f"{prefill} for a context of {len(context)} tokens"
    versions = [span.version for span in prefill.spans]
    return state, KvRange(min(versions), max(versions))


class TurnModel(Protocol):
    """Interface through which a simulated engine samples and scores tokens."""

    def next_token(
        self,
        context: "HashedContext",
        message: SubmitTurn,
        *,
        content: int,
        version: int,
        engine: str,
    ) -> Sampled:
        """Sample the next token of ``context`` with the weights ``content``, numbered
        ``version``."""

    def logprobs(self, tokens: "array[int]", start: int, *, content: int) -> list[float]:
        """Return the log-prob of each token from ``start`` on under the weights ``content``."""


class HashModel:
    """Model interface over this module's hash."""

    def next_token(
        self,
        context: "HashedContext",
        message: SubmitTurn,
        *,
        content: int,
        version: int,
        engine: str,
    ) -> Sampled:
        """Sample from a hash of the context state, seed, token index, weights and engine name."""
        index = message.sampled_before + len(context.tokens) - len(message.token_ids) // 4
        seed = message.sampling.seed
        return sample(context.state, seed=seed, index=index, content=content, engine=engine)

    def logprobs(self, tokens: "array[int]", start: int, *, content: int) -> list[float]:
        """Return log-probs hashed from each token's prefix and the weights, equal on all
        engines."""
        state, logprobs = 0, list[float]()
        for token in tokens:
            state = absorb(state, token, content)
            logprobs.append(-((state >> 40) % 4096) / 1024)
        return logprobs[start:]


class HashedContext:
    """One turn's tokens in a simulated engine, and the KV computed for them so far."""

    __slots__ = ("_spans", "_state", "computed", "tokens")

    def __init__(self, tokens: "array[int]") -> None:
        self.tokens = tokens
        self.computed = 0
        """Number of leading positions whose KV is computed."""
        self._state = 0
        self._spans: list[KvSpan] = []

    def compute(self, positions: int, *, content: int, version: int) -> None:
        """Compute the KV of the next positions by weights ``content``, numbered ``version``."""
        start, end = self.computed, self.computed + positions
        for token in self.tokens[start:end]:
            self._state = absorb(self._state, token, content)
        if self._spans and self._spans[-1].version == version:
            self._spans[-1] = KvSpan(version, self._spans[-1].start, end)
        else:
            self._spans.append(KvSpan(version, start, end))
        self.computed = end

    @property
    def state(self) -> int:
        """Hash of all positions whose KV is computed."""
        return self._state

    @property
    def spans(self) -> list[KvSpan]:
        """Versions whose weights computed the KV, by range of positions."""
        return self._spans.copy()

    def drop_kv(self) -> None:
        """Discard all KV and keep the tokens."""
        self.computed = self._state = 0
        self._spans.clear()
