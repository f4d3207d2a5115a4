"""Prometheus metrics of the vLLM-compatible server, under vLLM's names.

The route ``/metrics`` of ``app.py`` renders it; ``completions.py`` counts. Ended requests are
counted here; all other figures are read from the run at each scrape. Written as text; no library is
needed. Built on the run's :class:`Scheduler`.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.orchestrator.scheduler.scheduler import Scheduler

FINISH_REASONS = ("stop", "length", "abort")

LATENCY_BOUNDS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0)
"""Bounds of the latency histogram: vLLM's own, up to a minute."""

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


@dataclass(slots=True)
class RequestCounts:
    """Counters of the requests that have ended."""

    finished: Counter[str] = field(default_factory=Counter)
    """Number of choices, by finish reason."""
    prompt_tokens: int = 0
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    """Number of requests by latency, in the intervals between LATENCY_BOUNDS_S."""
    latency_total_s: float = 0.0

    def count(self, *, began_s: float, prompt_tokens: int, finish_reasons: Iterable[str]) -> None:
        """Count a request that has ended; ``began_s`` is on the monotonic clock."""
        took_s = time.monotonic() - began_s
        self.prompt_tokens += prompt_tokens
        self.latencies[bisect_left(LATENCY_BOUNDS_S, took_s)] += 1
        self.latency_total_s += took_s
        self.finished.update(finish_reasons)


def metrics_text(
    counts: RequestCounts,
    scheduler: "Scheduler",
    *,
    model: str,
    is_sleeping: bool,
    longest_block_s: float = 0.0,
) -> str:
    """Write the body of ``/metrics``."""
    about = f'model_name="{model}"'
    fleet, turns = scheduler.fleet, scheduler.core.turns
    sent = [(len(e.submissions), e.max_running_turns) for e in turns.engines.values()]
    running = sum(min(pair) for pair in sent)
    waiting = sum(submitted for submitted, _ in sent) - running + len(turns.waiting)
    generated = scheduler.core.evaluation_ledger.generated
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
