"""Probes of an engine's behaviour: log-prob mode, repeatability, prefix cache, weight updates.

:func:`measuring.measure` calls them. They send requests through :class:`ExaminedEngine` (HTTP), and
compare the engine with itself; :mod:`reference` compares it with the model. Only
:func:`weight_update` changes the engine.
"""

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from math import exp
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tidegate.cli.engine_doctor.examined import ExaminedEngine, ProbeRequest, ProbeResponse
from tidegate.cli.engine_doctor.measurements import (
    Distance,
    LogprobMode,
    PrefixCache,
    Repeats,
    UpdateProbe,
)
from tidegate.errors import EngineLost

if TYPE_CHECKING:
    from tidegate.cli.engine_doctor.reference import Reference

OUTPUT_TOKENS = 16
"""Enough for a difference to grow; at 20 ms each on the slowest server measured."""

NEIGHBOURS = 6
"""Concurrent requests in the test of batch dependence."""

GAP_MIN_NATS = 0.1
"""Ratios of smaller gaps are dominated by rounding."""

TOPS = 5
"""Most likely tokens requested; every server allows at least 20."""


def logprob_mode(engine: ExaminedEngine, prompt: tuple[int, ...]) -> LogprobMode:
    """Determine whether log-probs are those before or after temperature and truncation.

    Temperature divides the difference between two tokens' log-probs. Truncation raises all
    remaining tokens' log-probs by one amount.
    """
    ratios = []
    for shift in range(3):
        start = prompt[shift:]
        warm, cool = (
            engine.generate(
                ProbeRequest(
                    token_ids=start, tokens_max=1, temperature=temperature, top_logprobs=TOPS
                )
            )
            for temperature in (1.0, 0.5)
        )
        ratios += _gap_ratios(warm, cool)
    cut = engine.generate(
        ProbeRequest(token_ids=prompt, tokens_max=1, temperature=1.0, top_k=2, top_logprobs=2)
    )
    return LogprobMode(
        gap_ratio=median(ratios) if ratios else None,
        truncated_mass=_mass(cut),
    )


def _gap_ratios(warm: ProbeResponse, cool: ProbeResponse) -> list[float]:
    """Return the ratios of the gaps of all token pairs reported at both temperatures."""
    if not warm.top or not cool.top:
        return []
    shared = sorted(warm.top[0].keys() & cool.top[0].keys())
    ratios = []
    for one, other in combinations(shared, 2):
        gap = warm.top[0][one] - warm.top[0][other]
        if abs(gap) >= GAP_MIN_NATS:
            ratios.append((cool.top[0][one] - cool.top[0][other]) / gap)
    return ratios


def _mass(cut: ProbeResponse) -> float | None:
    if not cut.top or len(cut.top[0]) < 2:
        return None
    return sum(exp(logprob) for logprob in sorted(cut.top[0].values())[-2:])


def repeats_of(engine: ExaminedEngine, prompt: tuple[int, ...], first: ProbeResponse) -> Repeats:
    """Repeat the request of ``first``: alone, beside others, and sampled with a seed."""
    request = ProbeRequest(token_ids=prompt, tokens_max=OUTPUT_TOKENS)
    alone = [engine.generate(request) for _ in range(2)]
    neighbours = [
        ProbeRequest(token_ids=prompt[n:] + prompt[:n], tokens_max=OUTPUT_TOKENS)
        for n in range(1, NEIGHBOURS + 1)
    ]
    with ThreadPoolExecutor(NEIGHBOURS + 1) as threads:
        crowded = next(threads.map(engine.generate, [request, *neighbours]))
    sampled = ProbeRequest(token_ids=prompt, tokens_max=OUTPUT_TOKENS, temperature=1.0, seed=7)
    return Repeats(
        alone_same_tokens=all(again.token_ids == first.token_ids for again in alone),
        alone_difference=max(_difference(first, again) for again in alone),
        batch_same_tokens=crowded.token_ids == first.token_ids,
        batch_difference=_difference(first, crowded),
        seed_same_tokens=engine.generate(sampled).token_ids == engine.generate(sampled).token_ids,
    )


def _difference(one: ProbeResponse, other: ProbeResponse) -> float:
    """Return the largest log-prob difference before the first different token."""
    largest = 0.0
    pairs = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=False)
    for token, again, logprob, logprob_again in pairs:
        if token != again:
            break
        largest = max(largest, abs(logprob - logprob_again))
    return largest


def prefix_cache(engine: ExaminedEngine, prompt: tuple[int, ...]) -> PrefixCache:
    """Send a new prompt, send it again, and send it with another salt."""
    salts = (None, None, f"doctor-{secrets.token_hex(4)}")
    responses, found = [], []
    for salt in salts:
        before = engine.cached_tokens_total()
        request = ProbeRequest(token_ids=prompt, tokens_max=4, top_logprobs=TOPS, cache_salt=salt)
        responses.append(engine.generate(request))
        cached = responses[-1].cached_tokens
        after = engine.cached_tokens_total()
        if cached is None and before is not None and after is not None:
            cached = after - before
        found.append(cached)
    first, again, salted = found
    return PrefixCache(
        first_tokens=first,
        again_tokens=again,
        salted_tokens=salted,
        difference=_next_token_difference(responses[0], responses[1]),
    )


def _next_token_difference(one: ProbeResponse, other: ProbeResponse) -> float:
    """Return the largest log-prob difference over the first token's likely candidates.

    If a candidate is missing in the second response, this is a lower bound: the candidate is less
    likely than those reported.
    """
    if not one.top or not other.top or not other.top[0]:
        return _difference(one, other)
    least = min(other.top[0].values())
    return max(abs(p - other.top[0].get(token, least)) for token, p in one.top[0].items())


# ---------------------------------------------------------------- weight updates


def weight_update(
    engine: ExaminedEngine,
    prompt: tuple[int, ...],
    *,
    served: tuple[Path, "Reference"],
    other: tuple[Path, "Reference"],
    progress: Callable[[str], None],
) -> UpdateProbe:
    """Load ``other`` weights, then the ``served`` ones again, and send the prompt after each.

    The first update clears the engine's cache and the second does not, to show what the cache does
    by itself. Afterwards the engine has its original weights and an empty cache.

    Raises:
        EngineLost: the engine stopped responding, or could not be given its weights again.
    """
    # First the weights it already has: an engine that refuses updates then loses nothing.
    if (refused := _load(engine, served[0])) is not None:
        return UpdateProbe(refused=refused)
    request = ProbeRequest(token_ids=prompt, tokens_max=OUTPUT_TOKENS)
    engine.generate(request)  # puts the prompt's KV into the cache, if there is one
    try:
        if (refused := _load(engine, other[0])) is not None:
            return UpdateProbe(refused=refused)
        progress("generating with other weights")
        cleared = _distance(engine.generate(request), prompt, other[1], served[1])
        _restore_weights(engine, served[0], clears_cache=False)
        progress("generating with its own weights again")
        kept = _distance(engine.generate(request), prompt, served[1], other[1])
        salt = f"doctor-{secrets.token_hex(4)}"
        salted = engine.generate(replace(request, cache_salt=salt))
        return UpdateProbe(
            cleared=cleared,
            kept=kept,
            salted=_distance(salted, prompt, served[1], other[1]),
        )
    finally:
        _restore_weights(engine, served[0], clears_cache=True)


def _load(engine: ExaminedEngine, directory: Path, *, clears_cache: bool = True) -> str | None:
    """Return None, or why the engine refuses."""
    return engine.load_weights(directory.resolve(), clears_cache=clears_cache)


def _restore_weights(engine: ExaminedEngine, directory: Path, *, clears_cache: bool) -> None:
    try:
        why = _load(engine, directory, clears_cache=clears_cache)
    except EngineLost as error:
        why = str(error)
    if why is not None:
        raise EngineLost(
            f"the engine did not get its own weights back from {directory.resolve()}: {why}. "
            f"Restart it, because it serves other weights now"
        )


def _distance(
    response: ProbeResponse, prompt: tuple[int, ...], now: "Reference", before: "Reference"
) -> Distance:
    """Compare on the engine's own tokens, teacher-forced in float32."""
    of_now = now.logprobs(prompt, response.token_ids)
    of_before = before.logprobs(prompt, response.token_ids)
    return Distance(
        from_new=_mean_difference(response.logprobs, of_now),
        from_old=_mean_difference(response.logprobs, of_before),
        between=_mean_difference(of_now, of_before),
    )


def _mean_difference(first: tuple[float, ...] | list[float], second: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(second)
