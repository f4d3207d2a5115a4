"""What does an engine answer when it is asked on purpose? Some thirty short requests.

It measures and doesn't judge. Nothing it sends changes the engine, unless its weights are to be
updated: no pause, no cleared cache, no token id that isn't the model's (one such ends an SGLang
server).
"""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.engine_doctor.examined import Answer, ExaminedEngine, Question
from tidegate.cli.engine_doctor.findings import MEAN_ROUNDED_NATS
from tidegate.cli.engine_doctor.http import Http
from tidegate.cli.engine_doctor.measurements import (
    Measurements,
    Mismatch,
    TokenizerCheck,
    WeightUpdate,
)
from tidegate.cli.engine_doctor.probes import (
    OUTPUT_TOKENS,
    logprob_mode,
    prefix_cache,
    repeats_of,
)
from tidegate.cli.engine_doctor.sglang import ExaminedSglang, identify_sglang
from tidegate.cli.engine_doctor.updating import weight_update
from tidegate.cli.engine_doctor.vllm import ExaminedVllm, identify_vllm
from tidegate.errors import ConfigError, EngineLost

if TYPE_CHECKING:
    from tidegate.cli.engine_doctor.reference import Reference

LONG_PROMPT_TOKENS = 288
"""Two full blocks of 128, the largest that engines cut their caches into, and some more."""

TEXTS = (
    "The tide is out; the gate stays shut.",
    "  two  spaces,\ttab,\nnew line\r\n",
    "3.14159 + 2,718,281 = ?",
    "def f(x):\n    return x ** 2  # 平方",
    "naïve façade, Ελληνικά, русский, 日本語, 한국어",
    "<|im_start|>user\nhi<|im_end|>",
    "👩‍🚀🏴‍☠️",
)
"""Where tokenizers part: spaces, digits, scripts, special tokens written as text, joined emoji."""


def examined(url: str) -> ExaminedEngine:
    """Find out what kind of engine is at ``url``.

    Raises:
        EngineLost: nobody answers.
        ConfigError: what answers is none that we know.
    """
    http = Http(url)
    if (identity := identify_sglang(http)) is not None:
        return ExaminedSglang(http, identity)
    if (identity := identify_vllm(http)) is not None:
        return ExaminedVllm(http, identity)
    raise ConfigError(
        f"{http.url} answers, but neither as SGLang (/model_info) nor as vLLM (/v1/models); give "
        f"the address of the engine itself, not of a router or a web page"
    )


def measure(
    engine: ExaminedEngine,
    model: Path | None = None,
    *,
    updates: bool = False,
    progress: Callable[[str], None] = lambda doing: None,
) -> Measurements:
    """Ask all there is to ask; ``model`` is the directory of the weights it serves.

    Args:
        engine: whom.
        model: what to compare with.
        updates: give it other weights, and its own again: for ``model``'s sake nobody else
            should use it meanwhile.
        progress: is told what is being done.

    Raises:
        EngineLost: it refuses to generate, stops answering, or won't have its weights again.
        AuditError: ``model`` can't be loaded.
        ConfigError: weights are to be updated, and there is no ``model``, or no room beside it.
    """
    if updates and model is None:
        raise ConfigError("--update needs --model: the weights that it is to serve again at last")
    reference = None
    if model is not None:
        progress("loading the model to compare with")
        reference = _load(model)
    progress("asking it for tokens")
    prompt = drawn_prompt(engine, reference, 24)
    greedy = engine.ask(Question(token_ids=prompt, tokens_max=OUTPUT_TOKENS))
    if len(greedy.logprobs) != len(greedy.token_ids) or not greedy.token_ids:
        raise EngineLost(
            f"it told {len(greedy.logprobs)} log-probs of {len(greedy.token_ids)} tokens: nothing "
            f"can be trained on that"
        )
    progress("measuring log-probs")
    mode = logprob_mode(engine, prompt)
    progress("asking again")
    repeats = repeats_of(engine, prompt, greedy)
    progress("looking at its prefix cache")
    cache = prefix_cache(engine, _long_prompt(engine, reference))
    progress("comparing")
    mismatch = None if reference is None else _mismatch(engine, prompt, greedy, reference)
    tokenizer = None if reference is None else _tokenizer(engine, reference)
    update = None
    if updates and model is not None and reference is not None and mismatch is not None:
        # At its end an engine has the model's weights: they must be those that it has now.
        is_left_out = mismatch.mean > MEAN_ROUNDED_NATS
        update = (
            WeightUpdate(is_left_out=True)
            if is_left_out
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
) -> WeightUpdate:
    from tidegate.cli.engine_doctor.altered import altered  # torch, too

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
    """So many ids that are surely the model's: those of texts."""
    text = " ".join(TEXTS)
    ids = engine.tokenize(text) or (reference and reference.tokenize(text))
    known = sorted(set(ids or range(10, 42)))
    # Drawn anew, or else the KV of an earlier prompt or examination would be found.
    return tuple(secrets.choice(known) for _ in range(tokens))


def _long_prompt(engine: ExaminedEngine, reference: "Reference | None") -> tuple[int, ...]:
    context = engine.identity.context_tokens_max or 4 * LONG_PROMPT_TOKENS
    tokens = max(1, min(LONG_PROMPT_TOKENS, context - 2 * OUTPUT_TOKENS))
    return drawn_prompt(engine, reference, tokens)


def _mismatch(
    engine: ExaminedEngine, prompt: tuple[int, ...], greedy: Answer, reference: "Reference"
) -> Mismatch:
    """At temperature 1, where raw and processed log-probs are the same."""
    sampled = engine.ask(Question(token_ids=prompt, tokens_max=4 * OUTPUT_TOKENS, temperature=1.0))
    differences = [
        abs(told - true)
        for answer in (greedy, sampled)
        for told, true in _beside(prompt, answer, reference)
    ]
    return Mismatch(
        tokens=len(differences),
        mean=sum(differences) / len(differences),
        largest=max(differences),
    )


def _beside(
    prompt: Sequence[int], answer: Answer, reference: "Reference"
) -> list[tuple[float, float]]:
    true = reference.logprobs(prompt, answer.token_ids)
    return list(zip(answer.logprobs, true, strict=True))


def _tokenizer(engine: ExaminedEngine, reference: "Reference") -> TokenizerCheck | None:
    different = []
    for text in TEXTS:
        theirs, ours = engine.tokenize(text), reference.tokenize(text)
        if theirs is None or ours is None:
            return None
        if theirs != ours:
            different.append(text)
    return TokenizerCheck(texts=len(TEXTS), different=tuple(different))
