"""Findings of `tidegate doctor`: what an engine's measurements mean for RL, and what to do.

Pure functions from :class:`Measurements` to findings: tokens, log-probs and seeds, the routes in
/openapi.json, and responses around a weight update. Each threshold states its reason.
"""

from dataclasses import dataclass
from enum import StrEnum

from tidegate.cli.engine_doctor.measurements import (
    Distance,
    EngineKind,
    Identity,
    LogprobMismatch,
    LogprobMode,
    Measurements,
    PrefixCache,
    Repeats,
    TokenizerCheck,
    UpdateProbe,
)


class Verdict(StrEnum):
    """Severity of a finding. Only ``FAIL`` sets the command's exit status to 1."""

    OK = "ok"
    NOTE = "note"
    """Something that could not be measured, or that is a matter of preference; not a fault."""
    WARN = "warn"
    """Training works, but worse or with fewer features."""
    FAIL = "fail"
    """Tokens would be trained on with wrong log-probs or wrong weights, or can't be obtained."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about an engine: a line of the doctor's report."""

    check: str
    """Name of the check; the same in every report."""
    verdict: Verdict
    says: str
    """What the measurements show, in one sentence."""
    remedy: str = ""
    """What the user can do about the finding; empty if nothing is necessary."""


def _ok(check: str, says: str, remedy: str = "") -> Finding:
    return Finding(check, Verdict.OK, says, remedy)


def _note(check: str, says: str, remedy: str = "") -> Finding:
    return Finding(check, Verdict.NOTE, says, remedy)


def _warn(check: str, says: str, remedy: str) -> Finding:
    return Finding(check, Verdict.WARN, says, remedy)


def _fail(check: str, says: str, remedy: str) -> Finding:
    return Finding(check, Verdict.FAIL, says, remedy)


DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1, and let no other host reach it"
NEWER_SGLANG = "use SGLang 0.5.21 or newer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A feature that RL training needs of an engine server."""

    name: str
    any_of: tuple[str, ...]
    """HTTP routes, any one of which provides the feature."""
    remedy: str
    """What the user can do about a server without any of the routes."""
    without_it: Verdict = Verdict.FAIL
    """Verdict about a server without any of the routes."""


TOKENS = Capability(
    name="token ids in and out",
    any_of=("/inference/v1/generate",),
    remedy="start it with --enable-scale-out, because engine_urls needs the route; /v1/completions "
    "returns tokens, but no weight spans",
    without_it=Verdict.WARN,
)

NEEDED: dict[EngineKind, tuple[Capability, ...]] = {
    "vllm": (
        TOKENS,
        Capability(name="pause and resume", any_of=("/pause",), remedy=DEV_MODE),
        Capability(
            name="weight updates",
            any_of=("/start_weight_update", "/collective_rpc"),
            remedy=f"{DEV_MODE}; over NCCL or IPC also with --weight-transfer-config",
        ),
        Capability(
            name="weight labels",
            any_of=("/weight_info",),
            remedy="use vLLM 0.27 or newer; " + DEV_MODE,
            without_it=Verdict.WARN,
        ),
        Capability(
            name="sleep and wake",
            any_of=("/sleep",),
            remedy=f"needed only if the trainer shares its GPU: --enable-sleep-mode; {DEV_MODE}",
            without_it=Verdict.NOTE,
        ),
    ),
    "sglang": (
        Capability(
            name="token ids in and out",
            any_of=("/generate",),
            remedy="give the address of an SGLang server",
        ),
        Capability(
            name="pause and resume",
            any_of=("/pause_generation",),
            remedy="use SGLang 0.5.6 or newer, which can pause in place and by retraction",
        ),
        Capability(
            name="weight updates", any_of=("/update_weights_from_disk",), remedy=NEWER_SGLANG
        ),
        Capability(
            name="update sessions",
            any_of=("/begin_weight_update",),
            remedy=NEWER_SGLANG,
            without_it=Verdict.WARN,
        ),
        Capability(
            name="sleep and wake",
            any_of=("/release_memory_occupation",),
            remedy="needed only if the trainer shares its GPU: --enable-memory-saver",
            without_it=Verdict.NOTE,
        ),
    ),
    "tidegate": (
        Capability(
            name="pause and resume",
            any_of=("/pause",),
            remedy="give the address of the run's own server, not of an agent gateway",
            without_it=Verdict.NOTE,
        ),
    ),
}


def capability_findings(identity: Identity, *, weight_spans: bool) -> list[Finding]:
    """Return one finding for all features present, and one for each missing feature."""
    has = [need for need in NEEDED[identity.kind] if identity.paths.intersection(need.any_of)]
    lacks = [need for need in NEEDED[identity.kind] if need not in has]
    parts = []
    if has:
        says = ", ".join(need.name for need in has)
        parts.append(_ok("capabilities", says))
    for need in lacks:
        says = f"{need.name}: it has no {' or '.join(need.any_of)}"
        parts.append(Finding("capabilities", need.without_it, says, need.remedy))
    if not weight_spans:
        parts.append(
            _warn(
                "weight spans",
                "responses don't say which weights sampled which tokens",
                "take vLLM 0.32 with --enable-scale-out or SGLang 0.5.19, or newer: a turn "
                "that an update crosses is labelled only as well as Tidegate saw it",
            )
        )
    return parts


MISMATCHES_MAX = 5.0
"""A response matches a set of weights if its distance is at most this multiple of the mismatch
measured before. Noise spreads logits, and rounding errors grow with them."""

SAME_NATS = 1e-3
"""Distance allowed if the engine does not round: it then differs from transformers by 1e-6 to
1e-5."""

SAME_SHARE_MAX = 0.25
"""The distance must also be at most this share of the distance between the two sets of weights.
KV of other weights was measured at half of it and more, another head at a seventh."""

UPDATE_REMEDIES: dict[EngineKind, str] = {
    "vllm": "mount the model's directory at the same path there, start it with "
    "VLLM_SERVER_DEV_MODE=1, and see its log",
    "sglang": "mount the model's directory at the same path there, and see its log",
    "tidegate": "mount the model's directory at the same path there, and see its log",
}

NEITHER_REMEDIES: dict[EngineKind, str] = {
    "vllm": "part of the old weights or their KV is still in use. On a CPU vLLM does not update a "
    "tied head: untie it (tie_word_embeddings=false, with an lm_head.weight); otherwise switch "
    "prefix caching and quantization off",
    "sglang": "part of the old weights or their KV is still in use: try --disable-radix-cache, "
    "without quantization",
    "tidegate": "report this: part of the old weights or their KV is still in use",
}

KEPT_REMEDIES: dict[EngineKind, str] = {
    "vllm": "engine_urls sends a salt for each version; for your own requests, clear_cache=true",
    "sglang": "engine_urls sends an extra_key for each version; for your own requests, "
    "flush_cache=true",
    "tidegate": "report this: a swap should discard the prefix cache",
}


def update_findings(
    kind: EngineKind, update: UpdateProbe, mismatch: LogprobMismatch | None
) -> list[Finding]:
    """Judge whether the engine takes new weights, and what its cache does on an update."""
    if update.is_skipped:
        return [
            _fail(
                "weight update",
                "skipped: the engine's weights are not --model's, so they could not be restored",
                "pass --model the directory of the weights it serves now",
            )
        ]
    if update.refused is not None:
        return [
            _fail(
                "weight update",
                f"the engine refuses new weights: {update.refused}",
                UPDATE_REMEDIES[kind],
            )
        ]
    assert update.cleared is not None
    assert update.kept is not None
    assert update.salted is not None
    allowed = max(SAME_NATS, MISMATCHES_MAX * (mismatch.mean if mismatch else 0.0))
    cleared = _cleared(kind, update.cleared, allowed)
    if cleared.verdict != Verdict.OK:
        return [cleared]
    return [cleared, _kept(kind, update.kept, update.salted, allowed)]


def _cleared(kind: EngineKind, distance: Distance, allowed: float) -> Finding:
    if _matches_new(distance, allowed):
        return _ok(
            "weight update",
            f"it computes with the new weights at once: log-probs are {distance.from_new:.2g} nats "
            f"from theirs, and {distance.from_old:.2g} from the old weights'",
        )
    measured = (
        f"log-probs differ by {distance.from_new:.2g} nats from those of the new weights, and by "
        f"{distance.from_old:.2g} from those of the old, which are {distance.between:.2g} apart"
    )
    if distance.from_old <= SAME_SHARE_MAX * distance.between:
        says = f"it accepts new weights, but computes with the old ones: {measured}"
        return _fail("weight update", says, UPDATE_REMEDIES[kind])
    says = f"after an update that clears the cache, it matches neither weights: {measured}"
    return _fail("weight update", says, NEITHER_REMEDIES[kind])


def _kept(kind: EngineKind, kept: Distance, salted: Distance, allowed: float) -> Finding:
    if _matches_new(kept, allowed):
        return _ok(
            "cache over an update", "an update clears the cache even if it does not ask for that"
        )
    says = (
        f"an update that does not clear the cache leaves KV of the old weights in use: log-probs "
        f"differ by {kept.from_new:.2g} nats from those of the new weights"
    )
    if _matches_new(salted, allowed):
        judge = _warn if kind == "tidegate" else _ok
        separated = f"{says}; a prompt with another salt does not find the KV"
        return judge("cache over an update", separated, KEPT_REMEDIES[kind])
    return _fail(
        "cache over an update",
        f"{says}, and a prompt with another salt finds the KV too",
        CLEAR_REMEDY,
    )


def _matches_new(distance: Distance, allowed: float) -> bool:
    return distance.from_new <= min(allowed, SAME_SHARE_MAX * distance.between)


GAP_RATIO_TOLERANCE = 0.2
"""bfloat16 logits have 3 digits, so ratios of gaps of 1 to 2 nats vary by some percent. No known
engine has a ratio other than 1 or 2."""

MASS_LOST_MAX = 1e-3
"""Two float32 log-probs add up to a probability of 1 within 1e-6; in bfloat16, within 1e-4."""

MEAN_SAME_NATS = 1e-3
"""float32 engines differ from transformers by 1e-5, or by 1e-4 with other kernels."""

MEAN_ROUNDED_NATS = 0.1
"""bfloat16 with a bfloat16 head differs by 0.005 to 0.05 on average. Other weights, another
tokenizer or other positions differ by a nat and more."""

PROCESSED_REMEDIES: dict[EngineKind, str] = {
    "vllm": "start it with --logprobs-mode processed_logprobs, or sample at temperature 1 only",
    "sglang": "start it without SGLANG_RETURN_ORIGINAL_LOGPROB, or sample at temperature 1 only",
    "tidegate": "report this: Tidegate's engines should return the log-probs sampled from",
}

HEAD_REMEDIES: dict[EngineKind, str] = {
    "vllm": """start it with --hf-overrides '{"head_dtype": "float32"}' (newer versions), and """
    "train with a head of the same precision",
    "sglang": "start it with --enable-fp32-lm-head, and train with a head of the same precision",
    "tidegate": "its LM head is already float32: compare the dtypes of weights and activations",
}

INVARIANT_REMEDIES: dict[EngineKind, str] = {
    "vllm": "set VLLM_BATCH_INVARIANT=1 if the GPU supports it; else expect this noise in ratios",
    "sglang": "start it with --enable-deterministic-inference; else expect this noise in ratios",
    "tidegate": "use serve(deterministic=True); else expect this noise in ratios",
}

CLEAR_REMEDY = "clear the cache at every update: clear_cache=true, flush_cache=true"

SALT_REMEDIES: dict[EngineKind, str] = {
    "vllm": "send a cache_salt that names the weight version, or pause with clear_cache=true",
    "sglang": "update with flush_cache=true after pausing by retract or abort, or send an "
    "extra_key that names the weight version",
    "tidegate": "none needed: a swap discards the prefix cache",
}


def findings(measured: Measurements) -> list[Finding]:
    """Judge all measurements; the findings are in the order in which to fix them."""
    kind = measured.identity.kind
    return [
        *capability_findings(measured.identity, weight_spans=measured.weight_spans),
        *_samples_ahead(measured.identity),
        *_logprob_mode(kind, measured.logprobs),
        _mismatch(kind, measured.mismatch),
        _tokenizer(measured.tokenizer),
        *_repeats(kind, measured.repeats),
        *_prefix_cache(kind, measured.cache, is_updated=measured.is_updated),
        *(
            []
            if measured.update is None
            else update_findings(kind, measured.update, measured.mismatch)
        ),
    ]


def _samples_ahead(identity: Identity) -> list[Finding]:
    """Judge SGLang's overlap scheduler, which is on unless the settings say otherwise."""
    if identity.kind != "sglang" or identity.settings.get("disable_overlap_schedule"):
        return []
    return [
        _warn(
            "kept KV",
            'kv_policy="keep" will be refused: its overlap scheduler computes a step while '
            "weights change, and labels that step's tokens with the new version",
            "start it with --disable-overlap-schedule, or let the run recompute "
            '(kv_policy="recompute")',
        )
    ]


def _logprob_mode(kind: EngineKind, mode: LogprobMode) -> list[Finding]:
    if mode.gap_ratio is None:
        return [
            _note(
                "log-probs",
                "it returns no second token's log-prob, so it is unknown whether log-probs "
                "include temperature",
                "sample at temperature 1, or pass --model for a comparison",
            )
        ]
    if abs(mode.gap_ratio - 1) <= GAP_RATIO_TOLERANCE:
        return [
            _fail(
                "log-probs",
                f"raw: at temperature 0.5 gaps are {mode.gap_ratio:.2f} times those at 1, so "
                f"log-probs at temperatures other than 1 are not those sampled from",
                PROCESSED_REMEDIES[kind],
            )
        ]
    if abs(mode.gap_ratio - 2) > GAP_RATIO_TOLERANCE:
        return [
            _fail(
                "log-probs",
                f"at temperature 0.5 gaps are {mode.gap_ratio:.2f} times those at 1: neither "
                f"raw (1) nor processed (2)",
                "check what else changes its logits: penalties, biases, processors",
            )
        ]
    return _processed(mode)


def _processed(mode: LogprobMode) -> list[Finding]:
    """Judge log-probs with temperature applied. Logits have the same gaps, but do not sum to 1."""
    if (mode.truncated_mass or 0.0) > 1 + MASS_LOST_MAX:
        return [
            _fail(
                "log-probs",
                f"two tokens' probabilities sum to {mode.truncated_mass:.3g}: the values are "
                f"logits, not log-probs",
                "make it return log-probs (vLLM: --logprobs-mode processed_logprobs)",
            )
        ]
    return [
        _ok(
            "log-probs",
            f"processed: at temperature 0.5 gaps are {mode.gap_ratio:.2f} times those at 1",
        ),
        *_truncation(mode.truncated_mass),
    ]


def _truncation(mass: float | None) -> list[Finding]:
    if mass is None:
        return []
    if mass > 1 - MASS_LOST_MAX:
        says = "the tokens that top_k keeps have probability 1: log-probs include truncation"
        return [_ok("truncation", says)]
    return [
        _warn(
            "truncation",
            f"with top_k=2 both tokens together have probability {mass:.3f}: log-probs do not "
            f"include truncation",
            "sample with top_p=1, min_p=0 and no top_k, or correct for it in the loss",
        )
    ]


def _mismatch(kind: EngineKind, mismatch: LogprobMismatch | None) -> Finding:
    if mismatch is None:
        return _note(
            "mismatch",
            "not compared with the model's own log-probs",
            "pass --model DIRECTORY, the weights that it serves now",
        )
    measured = (
        f"log-probs of {mismatch.tokens} tokens differ from transformers' in float32 by "
        f"{mismatch.mean:.2g} nats on average, {mismatch.largest:.2g} at most"
    )
    if mismatch.mean <= MEAN_SAME_NATS:
        return _ok("mismatch", measured)
    if mismatch.mean <= MEAN_ROUNDED_NATS:
        return _warn(
            "mismatch",
            f"{measured}: rounding, mostly of the LM head",
            f"{HEAD_REMEDIES[kind]}; correct the rest (truncated importance sampling)",
        )
    return _fail(
        "mismatch",
        f"{measured}: more than rounding explains",
        "check that --model has the weights that it serves now, that its log-probs are "
        "processed, and that it does not quantize",
    )


def _tokenizer(check: TokenizerCheck | None) -> Finding:
    if check is None:
        return _note(
            "tokenizer",
            "not compared",
            "pass --model DIRECTORY; the engine also needs the route /tokenize",
        )
    if not check.different:
        says = f"{check.texts} texts have the same tokens as by the directory's tokenizer"
        return _ok("tokenizer", says)
    return _fail(
        "tokenizer",
        f"{len(check.different)} of {check.texts} texts have other tokens, "
        f"{check.different[0]!r} first",
        "give both the same tokenizer.json, and send token ids rather than text",
    )


def _repeats(kind: EngineKind, repeats: Repeats) -> list[Finding]:
    parts = [_batch(kind, repeats) if repeats.alone_same_tokens else _unsteady(kind, repeats)]
    if repeats.seed_same_tokens is False:
        parts.append(
            _warn(
                "seeds",
                "the same seed sampled two different outputs",
                "don't rely on seeds to reproduce rollouts; " + INVARIANT_REMEDIES[kind],
            )
        )
    return parts


def _unsteady(kind: EngineKind, repeats: Repeats) -> Finding:
    return _warn(
        "determinism",
        f"a repeated greedy request, with nothing else running, returned other tokens "
        f"(log-probs up to {repeats.alone_difference:.2g} nats apart before them)",
        INVARIANT_REMEDIES[kind],
    )


def _batch(kind: EngineKind, repeats: Repeats) -> Finding:
    worst = max(repeats.alone_difference, repeats.batch_difference)
    if repeats.batch_same_tokens and not worst:
        says = "a repeated request returned the same bits, alone and beside others"
        return _ok("determinism", says)
    if repeats.batch_same_tokens and worst <= MEAN_SAME_NATS:
        says = f"a repeated request returned the same tokens; log-probs within {worst:.2g} nats"
        return _ok("determinism", says)
    tokens = "the same" if repeats.batch_same_tokens else "other"
    return _warn(
        "determinism",
        f"beside other requests, a greedy request returned {tokens} tokens, and log-probs "
        f"up to {worst:.2g} nats apart: results depend on the batch",
        INVARIANT_REMEDIES[kind],
    )


def _prefix_cache(kind: EngineKind, cache: PrefixCache, *, is_updated: bool) -> list[Finding]:
    if cache.again_tokens is None:
        says = "it does not report how many tokens of a prompt were cached"
        return [_note("prefix cache", says, "assume that it is on: " + SALT_REMEDIES[kind])]
    if not cache.again_tokens:
        says = "off, or cleared at once: every turn is prefilled from its beginning"
        return [_note("prefix cache", says)]
    is_on = _cache_is_on(kind, cache, is_updated=is_updated)
    return [is_on, *_salt(kind, cache)]


def _cache_is_on(kind: EngineKind, cache: PrefixCache, *, is_updated: bool) -> Finding:
    cached = f"on: {cache.again_tokens} tokens of a repeated prompt were cached"
    if cache.difference <= MEAN_ROUNDED_NATS:
        says = (
            f"{cached}, with log-probs within {cache.difference:.2g} nats of the first response's"
        )
        if is_updated or kind == "tidegate":
            return _ok("prefix cache", says)
        return _ok(
            "prefix cache",
            f"{says}. By default such engines keep the old weights' KV at an update; --update "
            f"tests it",
            SALT_REMEDIES[kind],
        )
    return _fail(
        "prefix cache",
        f"{cached}, but log-probs are {cache.difference:.2g} nats from the first response's: "
        f"the cache may hold KV of other weights",
        "reset it (/reset_prefix_cache, /flush_cache) and run the doctor again; then: "
        + SALT_REMEDIES[kind],
    )


def _salt(kind: EngineKind, cache: PrefixCache) -> list[Finding]:
    if cache.salted_tokens is None or cache.again_tokens is None or kind == "tidegate":
        return []
    if cache.salted_tokens < cache.again_tokens:
        says = "a prompt with another salt finds nothing: a salt per version separates the versions"
        return [_ok("cache salt", says)]
    return [
        _warn(
            "cache salt",
            f"a prompt with another salt still found {cache.salted_tokens} cached tokens",
            CLEAR_REMEDY,
        )
    ]
