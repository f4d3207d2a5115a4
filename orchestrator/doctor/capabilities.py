"""What of the surface that RL needs does an engine have, and how is the rest switched on?

A table per engine; whether a path is there was found out before, from its /openapi.json.
"""

from dataclasses import dataclass

from tidegate.orchestrator.doctor.finding import Finding, Verdict
from tidegate.orchestrator.doctor.measurements import EngineKind, Identity

DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1, and let nobody else reach it"
NEWER_SGLANG = "take SGLang 0.5.21 or newer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One thing an engine must be able to do, and the routes it does it by; any one will do."""

    name: str
    any_of: tuple[str, ...]
    remedy: str
    without_it: Verdict = Verdict.FAIL


TOKENS = Capability(
    name="token ids in and out",
    any_of=("/inference/v1/generate",),
    remedy="start it with --enable-scale-out, or engine_urls can't have it; /v1/completions gives "
    "tokens, but no spans",
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
            remedy="take vLLM 0.27 or newer; " + DEV_MODE,
            without_it=Verdict.WARN,
        ),
        Capability(
            name="sleep and wake",
            any_of=("/sleep",),
            remedy=f"only where the trainer shares its GPU: --enable-sleep-mode; {DEV_MODE}",
            without_it=Verdict.NOTE,
        ),
    ),
    "sglang": (
        Capability(
            name="token ids in and out", any_of=("/generate",), remedy="that is no SGLang server"
        ),
        Capability(
            name="pause and resume",
            any_of=("/pause_generation",),
            remedy="take SGLang 0.5.6 or newer, which also pauses in place and by retraction",
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
            remedy="only where the trainer shares its GPU: --enable-memory-saver",
            without_it=Verdict.NOTE,
        ),
    ),
    "tidegate": (
        Capability(
            name="pause and resume",
            any_of=("/pause",),
            remedy="take the run's own server, not an agent's gateway",
            without_it=Verdict.NOTE,
        ),
    ),
}


def capability_findings(identity: Identity, *, weight_spans: bool) -> list[Finding]:
    """One finding for all that is there, and one for each thing that is not."""
    has = [need for need in NEEDED[identity.kind] if identity.paths.intersection(need.any_of)]
    lacks = [need for need in NEEDED[identity.kind] if need not in has]
    found = []
    if has:
        says = ", ".join(need.name for need in has)
        found.append(Finding(check="capabilities", verdict=Verdict.OK, says=says))
    for need in lacks:
        says = f"{need.name}: it has no {' or '.join(need.any_of)}"
        found.append(
            Finding(check="capabilities", verdict=need.without_it, says=says, remedy=need.remedy)
        )
    if not weight_spans:
        found.append(
            Finding(
                check="weight spans",
                verdict=Verdict.WARN,
                says="answers don't say which weights sampled which tokens",
                remedy="take vLLM 0.32 with --enable-scale-out or SGLang 0.5.19, or newer: a turn "
                "that an update crosses is labelled only as well as Tidegate saw it",
            )
        )
    return found
