"""What do an engine's answers around a weight update mean for training?

Measurements in, findings out, as findings.py for all else.
"""

from tidegate.orchestrator.doctor.finding import Finding, Verdict
from tidegate.orchestrator.doctor.measurements import Distance, EngineKind, Mismatch, WeightUpdate

MISMATCHES_MAX = 5.0
"""An answer is some weights' if it is no more than so many times as far from them as the engine was
from its own before: noise spreads logits, and rounding with them."""

SAME_NATS = 1e-3
"""Of an engine that rounds nothing: it differs from transformers by 1e-6 to 1e-5."""

SAME_SHARE_MAX = 0.25
"""Nor is it more than this share of what two sets' log-probs are apart. KV of other weights was
seen at a half and more, a head of other weights at a seventh."""

UPDATE_REMEDIES: dict[EngineKind, str] = {
    "vllm": "it must see the model's directory by the same path; start it with "
    "VLLM_SERVER_DEV_MODE=1, and see its log",
    "sglang": "it must see the model's directory by the same path; see its log",
    "tidegate": "its server must see the model's directory by the same path; see its log",
}

NEITHER_REMEDIES: dict[EngineKind, str] = {
    "vllm": "part of the old weights, or of their KV, is in use. On a CPU vLLM leaves a tied head "
    "as it was: untie it (tie_word_embeddings=false, with an lm_head.weight); else switch its "
    "prefix cache off, and quantise nothing",
    "sglang": "part of the old weights, or of their KV, is in use: try --disable-radix-cache, and "
    "quantise nothing",
    "tidegate": "report it: part of the old weights, or of their KV, is in use",
}

KEPT_REMEDIES: dict[EngineKind, str] = {
    "vllm": "engine_urls sends a salt for each version; of your own requests: clear_cache=true",
    "sglang": "engine_urls sends an extra_key for each version; of your own: flush_cache=true",
    "tidegate": "report it: a swap should forget the prefix cache",
}


def update_findings(
    kind: EngineKind, update: WeightUpdate, mismatch: Mismatch | None
) -> list[Finding]:
    """Whether it takes new weights, and what its cache does then."""
    if update.is_left_out:
        return [
            _finding(
                Verdict.FAIL,
                "left out: it doesn't serve --model's weights, which it would have at the end",
                "pass --model the directory of the weights it serves now",
            )
        ]
    if update.refused is not None:
        return [
            _finding(
                Verdict.FAIL, f"it refuses new weights: {update.refused}", UPDATE_REMEDIES[kind]
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
    if _is_new(distance, allowed):
        return _finding(
            Verdict.OK,
            f"new weights, and their KV, at once: log-probs {distance.from_new:.2g} nats from "
            f"theirs, {distance.from_old:.2g} from the old ones'",
        )
    told = (
        f"log-probs {distance.from_new:.2g} nats from the new weights', {distance.from_old:.2g} "
        f"from the old ones', which are {distance.between:.2g} apart"
    )
    if distance.from_old <= SAME_SHARE_MAX * distance.between:
        says = f"it takes new weights, and goes on with the old ones: {told}"
        return _finding(Verdict.FAIL, says, UPDATE_REMEDIES[kind])
    says = f"after an update that clears its cache it answers by neither weights: {told}"
    return _finding(Verdict.FAIL, says, NEITHER_REMEDIES[kind])


def _kept(kind: EngineKind, kept: Distance, salted: Distance, allowed: float) -> Finding:
    if _is_new(kept, allowed):
        return _finding(
            Verdict.OK,
            "forgets its cache by itself at an update that doesn't ask for it",
            check="cache over an update",
        )
    says = (
        f"an update that doesn't clear it leaves KV of the old weights in use: log-probs "
        f"{kept.from_new:.2g} nats from the new weights'"
    )
    if _is_new(salted, allowed):
        return _finding(
            Verdict.WARN if kind == "tidegate" else Verdict.OK,
            f"{says}; with a salt of its own a prompt finds none of it",
            KEPT_REMEDIES[kind],
            check="cache over an update",
        )
    return _finding(
        Verdict.FAIL,
        f"{says}, and a prompt with another salt finds it, too",
        "clear the cache at every update: clear_cache=true, flush_cache=true",
        check="cache over an update",
    )


def _is_new(distance: Distance, allowed: float) -> bool:
    return distance.from_new <= min(allowed, SAME_SHARE_MAX * distance.between)


def _finding(
    verdict: Verdict, says: str, remedy: str = "", *, check: str = "weight update"
) -> Finding:
    return Finding(check=check, verdict=verdict, says=says, remedy=remedy)
