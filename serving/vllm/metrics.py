"""Prometheus metrics of the vLLM-compatible server, under vLLM's names.

:class:`RequestCounts` has the requests that have ended; all other figures are read from the run at
each scrape.
"""

from typing import TYPE_CHECKING

from tidegate.serving.openai.completions import LATENCY_BOUNDS_S, RequestCounts

if TYPE_CHECKING:
    from tidegate.orchestrator.core.core import Core
    from tidegate.orchestrator.fleet.fleet import Fleet

FINISH_REASONS = ("stop", "length", "abort")

HELP = {
    "num_requests_running": "Turns that engines generate now.",
    "num_requests_waiting": "Turns that wait for a place on an engine.",
    "engine_sleep_state": "1 while the engines are awake.",
    "prefix_cache_queries_total": "Prompt tokens that were looked up in the prefix caches.",
    "prefix_cache_hits_total": "Prompt tokens that were found in the prefix caches.",
    "prompt_tokens_total": "Prompt tokens of requests that have ended.",
    "generation_tokens_total": "Tokens generated.",
    "request_success_total": "Choices that have ended, by finish reason.",
}
"""What each metric is, for its HELP line."""


def metrics_text(
    counts: RequestCounts,
    core: "Core",
    fleet: "Fleet",
    *,
    model: str,
    is_sleeping: bool,
    longest_block_s: float = 0.0,
) -> str:
    """Write the body of ``/metrics``."""
    about = f'model_name="{model}"'
    turns = core.turns
    sent = [(len(e.submissions), e.max_running_turns) for e in turns.engines.values()]
    running = sum(min(pair) for pair in sent)
    waiting = sum(submitted for submitted, _ in sent) - running + len(turns.waiting)
    generated = core.evaluation_ledger.generated
    lines = [
        *_metric("num_requests_running", "gauge", {about: running}),
        *_metric("num_requests_waiting", "gauge", {about: waiting}),
        *_metric("engine_sleep_state", "gauge", {f'{about},sleep_state="awake"': not is_sleeping}),
        *_metric("prefix_cache_queries_total", "counter", {about: fleet.context_tokens}),
        *_metric("prefix_cache_hits_total", "counter", {about: fleet.cached_context_tokens}),
        *_metric("prompt_tokens_total", "counter", {about: counts.prompt_tokens}),
        *_metric("generation_tokens_total", "counter", {about: generated}),
        *_metric(
            "request_success_total",
            "counter",
            {f'{about},finished_reason="{r}"': counts.finished[r] for r in FINISH_REASONS},
        ),
        *_latency(counts, about),
        "# HELP tidegate_event_loop_longest_block_seconds Longest time for which the event loop "
        "was blocked.",
        "# TYPE tidegate_event_loop_longest_block_seconds gauge",
        f"tidegate_event_loop_longest_block_seconds{{{about}}} {longest_block_s}",
    ]
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, values: dict[str, float]) -> list[str]:
    rows = [f"vllm:{name}{{{labels}}} {float(value)}" for labels, value in values.items()]
    return [f"# HELP vllm:{name} {HELP[name]}", f"# TYPE vllm:{name} {kind}", *rows]


def _latency(counts: RequestCounts, about: str) -> list[str]:
    name, seen = "vllm:e2e_request_latency_seconds", 0
    help_line = f"# HELP {name} Seconds from the request to the end of its answer."
    lines = [help_line, f"# TYPE {name} histogram"]
    for bound, count in zip((*LATENCY_BOUNDS_S, "+Inf"), counts.latencies, strict=True):
        seen += count
        lines.append(f'{name}_bucket{{{about},le="{bound}"}} {float(seen)}')
    total = f"{name}_sum{{{about}}} {counts.latency_total_s}"
    return [*lines, f"{name}_count{{{about}}} {float(seen)}", total]
