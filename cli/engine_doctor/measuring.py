"""Examination of an engine: identifies it, and measures it with about thirty short requests.

findings.py judges the results; log-probs to compare with are in :mod:`reference`. Unless weight
updates are requested, no request changes the engine: no pause, no cleared cache, and no token id
outside the vocabulary, which would crash an SGLang server.
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

from tidegate.cli.engine_doctor.examined import (
    ExaminedEngine,
    ExaminedSglang,
    ExaminedVllm,
    ProbeRequest,
    ProbeResponse,
    identify_sglang,
    identify_vllm,
)
from tidegate.cli.engine_doctor.findings import MEAN_ROUNDED_NATS
from tidegate.cli.engine_doctor.http import Http
from tidegate.cli.engine_doctor.measurements import (
    Distance,
    LogprobMismatch,
    LogprobMode,
    Measurements,
    PrefixCache,
    Repeats,
    TokenizerCheck,
    UpdateProbe,
)
from tidegate.errors import ConfigError, EngineLost

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


LONG_PROMPT_TOKENS = 288
"""More than two blocks of 128 tokens, the largest KV block size of engines."""

TEXTS = (
    "The tide is out; the gate stays shut.",
    "  two  spaces,\ttab,\nnew line\r\n",
    "3.14159 + 2,718,281 = ?",
    "def f(x):\n    return x ** 2  # 平方",
    "naïve façade, Ελληνικά, русский, 日本語, 한국어",
    "<|im_start|>user\nhi<|im_end|>",
    "👩‍🚀🏴‍☠️",
)
"""Texts that tokenizers treat differently: spaces, digits, scripts, special tokens, emoji."""


def examined(url: str) -> ExaminedEngine:
    """Identify the engine at ``url``.

    Raises:
        EngineLost: there is no response.
        ConfigError: the server is of no supported kind.
    """
    http = Http(url)
    if (identity := identify_sglang(http)) is not None:
        return ExaminedSglang(http, identity)
    if (identity := identify_vllm(http)) is not None:
        return ExaminedVllm(http, identity)
    raise ConfigError(
        f"{http.url} is neither an SGLang (/model_info) nor a vLLM server (/v1/models); give "
        f"the address of the engine itself, not of a router or a web page"
    )


def measure(
    engine: ExaminedEngine,
    model: Path | None = None,
    *,
    updates: bool = False,
    progress: Callable[[str], None] = lambda doing: None,
) -> Measurements:
    """Run all measurements.

    Args:
        engine: the engine to examine.
        model: directory of the weights that it serves, to compare with.
        updates: load other weights and then the original ones. No other client may use the engine
            meanwhile.
        progress: called with a text before each measurement.

    Raises:
        EngineLost: the engine refuses to generate, stops responding, or refuses its original
            weights.
        AuditError: ``model`` can't be loaded.
        ConfigError: updates are requested without ``model``, or without disk space beside it.
    """
    if updates and model is None:
        raise ConfigError(
            "--update needs --model, the weights that the engine gets back at the end"
        )
    reference = None
    if model is not None:
        progress("loading the model to compare with")
        reference = _reference(model)
    progress("requesting tokens")
    prompt = drawn_prompt(engine, reference, 24)
    greedy = engine.generate(ProbeRequest(token_ids=prompt, tokens_max=OUTPUT_TOKENS))
    if len(greedy.logprobs) != len(greedy.token_ids) or not greedy.token_ids:
        raise EngineLost(
            f"the engine returned {len(greedy.logprobs)} log-probs for {len(greedy.token_ids)} "
            f"tokens; training needs one for each"
        )
    progress("measuring log-probs")
    mode = _logprob_mode(engine, prompt)
    progress("repeating requests")
    repeats = _repeats_of(engine, prompt, greedy)
    progress("looking at its prefix cache")
    cache = _prefix_cache(engine, _long_prompt(engine, reference))
    progress("comparing")
    mismatch = None if reference is None else _mismatch(engine, prompt, greedy, reference)
    tokenizer = None if reference is None else _tokenizer(engine, reference)
    update = None
    if updates and model is not None and reference is not None and mismatch is not None:
        # The test leaves the engine with the model's weights: they must be those it has now.
        is_skipped = mismatch.mean > MEAN_ROUNDED_NATS
        update = (
            UpdateProbe(is_skipped=True)
            if is_skipped
            else _update(engine, model, reference, progress)
        )
    return Measurements(
        identity=engine.identity,
        logprobs=mode,
        repeats=repeats,
        cache=cache,
        weight_spans=greedy.has_weight_spans,
        mismatch=mismatch,
        tokenizer=tokenizer,
        update=update,
    )


def _update(
    engine: ExaminedEngine,
    model: Path,
    reference: "Reference",
    progress: Callable[[str], None],
) -> UpdateProbe:
    from tidegate.cli.engine_doctor.reference import altered  # torch, too

    progress("altering the model's weights")
    with altered(model) as directory:
        return _weight_update(
            engine,
            _long_prompt(engine, reference),
            served=(model, reference),
            other=(directory, _reference(directory)),
            progress=progress,
        )


def _reference(model: Path) -> "Reference":
    from tidegate.cli.engine_doctor.reference import Reference  # torch: only where it is needed

    return Reference(model)


def drawn_prompt(
    engine: ExaminedEngine, reference: "Reference | None", tokens: int
) -> tuple[int, ...]:
    """Return random token ids of the model's vocabulary, taken from the ids of :data:`TEXTS`."""
    text = " ".join(TEXTS)
    ids = engine.tokenize(text) or (reference and reference.tokenize(text))
    known = sorted(set(ids or range(10, 42)))
    # Random, so that no KV of an earlier prompt or examination is found.
    return tuple(secrets.choice(known) for _ in range(tokens))


def _long_prompt(engine: ExaminedEngine, reference: "Reference | None") -> tuple[int, ...]:
    context = engine.identity.context_tokens_max or 4 * LONG_PROMPT_TOKENS
    tokens = max(1, min(LONG_PROMPT_TOKENS, context - 2 * OUTPUT_TOKENS))
    return drawn_prompt(engine, reference, tokens)


def _mismatch(
    engine: ExaminedEngine, prompt: tuple[int, ...], greedy: ProbeResponse, reference: "Reference"
) -> LogprobMismatch:
    """Compare log-probs at temperature 0 and 1, where raw and processed log-probs are equal."""
    sampled = engine.generate(
        ProbeRequest(token_ids=prompt, tokens_max=4 * OUTPUT_TOKENS, temperature=1.0)
    )
    differences = [
        abs(reported - true)
        for response in (greedy, sampled)
        for reported, true in zip(
            response.logprobs, reference.logprobs(prompt, response.token_ids), strict=True
        )
    ]
    return LogprobMismatch(
        tokens=len(differences),
        mean=sum(differences) / len(differences),
        largest=max(differences),
    )


def _tokenizer(engine: ExaminedEngine, reference: "Reference") -> TokenizerCheck | None:
    different = []
    for text in TEXTS:
        engine_ids, reference_ids = engine.tokenize(text), reference.tokenize(text)
        if engine_ids is None or reference_ids is None:
            return None
        if engine_ids != reference_ids:
            different.append(text)
    return TokenizerCheck(texts=len(TEXTS), different=tuple(different))


# ---------------------------------------------------------------- probes


def _logprob_mode(engine: ExaminedEngine, prompt: tuple[int, ...]) -> LogprobMode:
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


def _repeats_of(engine: ExaminedEngine, prompt: tuple[int, ...], first: ProbeResponse) -> Repeats:
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


def _prefix_cache(engine: ExaminedEngine, prompt: tuple[int, ...]) -> PrefixCache:
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


def _weight_update(
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
