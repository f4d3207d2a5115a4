"""Which questions tell how an engine computes? Log-probs, repetitions, and its prefix cache.

Each function asks some and returns what came of it, judging nothing. What the model should have
said isn't known here: that is reference.py's.
"""

import secrets
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from math import exp
from statistics import median

from tidegate.cli.engine_doctor.examined import Answer, ExaminedEngine, Question
from tidegate.cli.engine_doctor.measurements import LogprobMode, PrefixCache, Repeats

OUTPUT_TOKENS = 16
"""Enough to see a difference grow; 20 ms each on the slowest server seen."""

NEIGHBOURS = 6
"""Requests that run beside one to see whether that changes it."""

GAP_MIN_NATS = 0.1
"""Ratios of smaller gaps are mostly rounding."""

TOPS = 5
"""Servers allow 20 at least."""


def logprob_mode(engine: ExaminedEngine, prompt: tuple[int, ...]) -> LogprobMode:
    """Whether temperature and truncation are in the log-probs: gaps of the same tokens tell."""
    ratios = []
    for shift in range(3):
        start = prompt[shift:]
        warm, cool = (
            engine.ask(
                Question(token_ids=start, tokens_max=1, temperature=temperature, top_logprobs=TOPS)
            )
            for temperature in (1.0, 0.5)
        )
        ratios += _gap_ratios(warm, cool)
    cut = engine.ask(
        Question(token_ids=prompt, tokens_max=1, temperature=1.0, top_k=2, top_logprobs=2)
    )
    return LogprobMode(
        gap_ratio=median(ratios) if ratios else None,
        truncated_mass=_mass(cut),
    )


def _gap_ratios(warm: Answer, cool: Answer) -> list[float]:
    """Of each pair of tokens told at both temperatures, in the same context."""
    if not warm.top or not cool.top:
        return []
    shared = sorted(warm.top[0].keys() & cool.top[0].keys())
    ratios = []
    for one, other in combinations(shared, 2):
        gap = warm.top[0][one] - warm.top[0][other]
        if abs(gap) >= GAP_MIN_NATS:
            ratios.append((cool.top[0][one] - cool.top[0][other]) / gap)
    return ratios


def _mass(cut: Answer) -> float | None:
    if not cut.top or len(cut.top[0]) < 2:
        return None
    return sum(exp(logprob) for logprob in sorted(cut.top[0].values())[-2:])


def repeats_of(engine: ExaminedEngine, prompt: tuple[int, ...], first: Answer) -> Repeats:
    """Ask what was answered by ``first`` again: alone, beside others, and sampled with a seed."""
    question = Question(token_ids=prompt, tokens_max=OUTPUT_TOKENS)
    alone = [engine.ask(question) for _ in range(2)]
    others = [
        Question(token_ids=prompt[n:] + prompt[:n], tokens_max=OUTPUT_TOKENS)
        for n in range(1, NEIGHBOURS + 1)
    ]
    with ThreadPoolExecutor(NEIGHBOURS + 1) as threads:
        crowded = next(threads.map(engine.ask, [question, *others]))
    sampled = Question(token_ids=prompt, tokens_max=OUTPUT_TOKENS, temperature=1.0, seed=7)
    return Repeats(
        alone_same_tokens=all(again.token_ids == first.token_ids for again in alone),
        alone_difference=max(_difference(first, again) for again in alone),
        batch_same_tokens=crowded.token_ids == first.token_ids,
        batch_difference=_difference(first, crowded),
        seed_same_tokens=engine.ask(sampled).token_ids == engine.ask(sampled).token_ids,
    )


def _difference(one: Answer, other: Answer) -> float:
    """The largest, up to the first token that is another."""
    largest = 0.0
    told = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=False)
    for token, again, logprob, logprob_again in told:
        if token != again:
            break
        largest = max(largest, abs(logprob - logprob_again))
    return largest


def prefix_cache(engine: ExaminedEngine, prompt: tuple[int, ...]) -> PrefixCache:
    """Send a prompt that nobody has sent before, again, and with another salt."""
    salts = (None, None, f"doctor-{secrets.token_hex(4)}")
    answers, found = [], []
    for salt in salts:
        before = engine.cached_tokens_total()
        question = Question(token_ids=prompt, tokens_max=4, top_logprobs=TOPS, cache_salt=salt)
        answers.append(engine.ask(question))
        told = answers[-1].cached_tokens
        after = engine.cached_tokens_total()
        if told is None and before is not None and after is not None:
            told = after - before
        found.append(told)
    first, again, salted = found
    return PrefixCache(
        first_tokens=first,
        again_tokens=again,
        salted_tokens=salted,
        difference=_next_token_difference(answers[0], answers[1]),
    )


def _next_token_difference(one: Answer, other: Answer) -> float:
    """Between what two answers say of the first token's likeliest candidates.

    A lower bound where the second doesn't tell of one: it is less likely than those it tells of.
    """
    if not one.top or not other.top or not other.top[0]:
        return _difference(one, other)
    least = min(other.top[0].values())
    return max(abs(p - other.top[0].get(token, least)) for token, p in one.top[0].items())
