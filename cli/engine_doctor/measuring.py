"""Examination of an engine: identifies it, and measures it with about thirty short requests.

findings.py judges the results. Probes are in :mod:`probes`, log-probs to compare with in
:mod:`reference`. Unless weight updates are requested, no request changes the engine: no pause, no
cleared cache, and no token id outside the vocabulary, which would crash an SGLang server.
"""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
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
    LogprobMismatch,
    Measurements,
    TokenizerCheck,
    UpdateProbe,
)
from tidegate.cli.engine_doctor.probes import (
    OUTPUT_TOKENS,
    logprob_mode,
    prefix_cache,
    repeats_of,
    weight_update,
)
from tidegate.errors import ConfigError, EngineLost

if TYPE_CHECKING:
    from tidegate.cli.engine_doctor.reference import Reference

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
        reference = _load(model)
    progress("requesting tokens")
    prompt = drawn_prompt(engine, reference, 24)
    greedy = engine.generate(ProbeRequest(token_ids=prompt, tokens_max=OUTPUT_TOKENS))
    if len(greedy.logprobs) != len(greedy.token_ids) or not greedy.token_ids:
        raise EngineLost(
            f"the engine returned {len(greedy.logprobs)} log-probs for {len(greedy.token_ids)} "
            f"tokens; training needs one for each"
        )
    progress("measuring log-probs")
    mode = logprob_mode(engine, prompt)
    progress("repeating requests")
    repeats = repeats_of(engine, prompt, greedy)
    progress("looking at its prefix cache")
    cache = prefix_cache(engine, _long_prompt(engine, reference))
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
        return weight_update(
            engine,
            _long_prompt(engine, reference),
            served=(model, reference),
            other=(directory, _load(directory)),
            progress=progress,
        )


def _load(model: Path) -> "Reference":
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
        for reported, true in _with_reference(prompt, response, reference)
    ]
    return LogprobMismatch(
        tokens=len(differences),
        mean=sum(differences) / len(differences),
        largest=max(differences),
    )


def _with_reference(
    prompt: Sequence[int], response: ProbeResponse, reference: "Reference"
) -> list[tuple[float, float]]:
    true = reference.logprobs(prompt, response.token_ids)
    return list(zip(response.logprobs, true, strict=True))


def _tokenizer(engine: ExaminedEngine, reference: "Reference") -> TokenizerCheck | None:
    different = []
    for text in TEXTS:
        engine_ids, reference_ids = engine.tokenize(text), reference.tokenize(text)
        if engine_ids is None or reference_ids is None:
            return None
        if engine_ids != reference_ids:
            different.append(text)
    return TokenizerCheck(texts=len(TEXTS), different=tuple(different))
