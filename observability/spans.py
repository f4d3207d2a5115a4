"""OpenTelemetry spans of a run: its rollouts with turns and tools, and its trainer's batches.

``serve(opentelemetry=True)`` adds the recorders. Each rollout is a trace of its own, whose span is
the current one in the episode's task, so that instrumented clients pass it on. Each batch is a
trace with links to its rollouts, in which the trainer's work follows. Names of a turn's attributes
are OpenTelemetry's for generative AI where there is one. Import this module only when it is used:
its package is an extra.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import opentelemetry.propagate  # noqa: F401 - from then on trace_headers() has some
from opentelemetry import context, trace
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from typing_extensions import override

from tidegate.errors import ConfigError
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.activities import TOOL
from tidegate.orchestrator.telemetry.recorder import (
    EpisodeObserver,
    Recorder,
    TrainerActivity,
)

LINKS_KEPT = 16_384
"""Latest rollouts whose spans a batch can link to: 5 MB."""

LAST_EXPORT_S = 2.0
"""Time that the end of a run waits for a collector which does not take the last spans."""

log = logging.getLogger("tidegate")


class Spans:
    """Makes the spans of one run. A span that can't be made or exported is logged, and no error."""

    def __init__(self) -> None:
        """Use the global tracer provider; if there is none, one that exports to the collector which
        ``OTEL_EXPORTER_OTLP_ENDPOINT`` names.

        Raises:
            ConfigError: there is none, and the OTLP exporter is not installed.
        """
        provider: Any = trace.get_tracer_provider()
        self._owned: Any = None
        """The provider if it is this run's own, and is closed with it."""
        if isinstance(provider, trace.ProxyTracerProvider):
            provider, self._exporter = _exporting_provider()
            self._owned = provider
        self._tracer = provider.get_tracer("tidegate", metadata.version("tidegate"))
        self.rollouts: dict[int, SpanContext] = {}
        """Spans of the latest rollouts, by rollout id."""

    def start(self, name: str, parent: Span | None = None, **options: Any) -> Span:
        """Start a span below ``parent``, or as the first of a trace."""
        within = context.Context()
        if parent is not None:
            within = trace.set_span_in_context(parent, within)
        try:
            span: Span = self._tracer.start_span(name, within, **options)
        except Exception as error:
            log.warning("a span could not be started", exc_info=error)
            span = trace.INVALID_SPAN
        return span

    def end(self, span: Span, at_ns: int | None = None) -> None:
        """End a span; harmless if repeated for one that is not recorded."""
        try:
            span.end(at_ns)
        except Exception as error:
            log.warning("a span could not be ended", exc_info=error)

    def remember(self, rollout_id: int, span: Span) -> None:
        """Remember the span of a rollout, which batches and its next attempt link to."""
        self.rollouts[rollout_id] = span.get_span_context()
        if len(self.rollouts) > LINKS_KEPT:
            del self.rollouts[next(iter(self.rollouts))]

    def close(self) -> None:
        """Export what is left, if the provider is the run's own."""
        if self._owned is None:
            return
        # The exporter repeats a failed request for 7 s, for every 512 spans, until it is shut down.
        give_up = threading.Timer(LAST_EXPORT_S, self._exporter.shutdown)
        give_up.start()
        self._owned.shutdown()
        give_up.cancel()


def _exporting_provider() -> tuple[Any, Any]:
    """Return a provider, and the exporter to which its spans go."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is missing: pip install 'tidegate[opentelemetry]', or set a tracer "
            f"provider before serve()"
        ) from None
    provider = TracerProvider()
    exporter = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter


class EpisodeSpans(EpisodeObserver):
    """Spans ``rollout``, and below it ``turn``, ``tool NAME`` and other activities."""

    def __init__(self, spans: Spans, model: str) -> None:
        """``model`` is the name of the run's model."""
        self._spans = spans
        self._model = model
        self._running: dict[int, Span] = {}
        """Spans of running episodes, by rollout id."""

    @override
    def began(self, rollout: Rollout) -> None:
        earlier = self._spans.rollouts.get(rollout.rollout_id)
        attributes: dict[str, Any] = {
            "tidegate.rollout.id": rollout.rollout_id,
            "tidegate.rollout.index": rollout.index,
            "tidegate.rollout.retries": rollout.retries,
            "tidegate.group.id": rollout.group_id,
            "tidegate.evaluation": rollout.group_id < 0,
            # A process before this one sampled its turns; the attempt before a retry is linked.
            "tidegate.resumed": bool(rollout.turns) and earlier is None,
        }
        if rollout.adapter:
            attributes["tidegate.adapter"] = rollout.adapter
        links = [] if earlier is None else [Link(earlier)]
        # The first of a trace: the task's context is that of whatever made room for the episode.
        span = self._spans.start("rollout", attributes=attributes, links=links)
        self._running[rollout.rollout_id] = span
        self._spans.remember(rollout.rollout_id, span)
        # Never detached: the context is the episode's task's own, and ends with it.
        context.attach(trace.set_span_in_context(span, context.Context()))

    @override
    def turn_started(self, rollout: Rollout, answer: "asyncio.Future[Turn]") -> None:
        episode = self._running.get(rollout.episode_id)
        if episode is None:
            return
        parent, links = self._parent(episode)
        # What the attributes are is known at its end: the turn is not made yet.
        span = self._spans.start("turn", parent, kind=SpanKind.CLIENT, links=links)
        answer.add_done_callback(partial(self._turn_ended, span, rollout))

    @staticmethod
    def _parent(episode: Span) -> tuple[Span, list[Link]]:
        """Return the current span if it is within the episode, else the episode's. A span of
        another process, whose trace is its own, is linked."""
        current = trace.get_current_span()
        known, own = current.get_span_context(), episode.get_span_context()
        if known.trace_id == own.trace_id:
            return current, []
        return episode, [Link(known)] if known.is_remote else []

    def _turn_ended(self, span: Span, rollout: Rollout, answer: "asyncio.Future[Turn]") -> None:
        error = None if answer.cancelled() else answer.exception()
        turn = rollout.turns[-1] if rollout.turns else None
        if error is not None:
            _fail(span, error)
        elif not answer.cancelled():
            turn = answer.result()
        if turn is not None and span.is_recording():
            finish_reason = turn.finish_reason or "cancelled"
            span.set_attributes(
                {
                    "gen_ai.operation.name": "text_completion",
                    "gen_ai.provider.name": "tidegate",
                    "gen_ai.request.model": turn.sampling.adapter or self._model,
                    "gen_ai.request.max_tokens": turn.sampling.max_tokens,
                    "gen_ai.request.temperature": turn.sampling.temperature,
                    "gen_ai.response.finish_reasons": [finish_reason],
                    "gen_ai.usage.input_tokens": turn.start,
                    "gen_ai.usage.output_tokens": turn.length,
                    "tidegate.rollout.id": turn.rollout_id,
                    "tidegate.turn": turn.number,
                    "tidegate.engines": list(dict.fromkeys(run.engine for run in turn.runs)),
                    "tidegate.versions": list(dict.fromkeys(run.version for run in turn.runs)),
                }
            )
        self._spans.end(span)

    @override
    def parked(self, rollout: Rollout) -> None:
        self._add_event(rollout, "parked")

    @override
    def unparked(self, rollout: Rollout) -> None:
        self._add_event(rollout, "unparked")

    def _add_event(self, rollout: Rollout, name: str) -> None:
        if (span := self._running.get(rollout.episode_id)) is not None:
            span.add_event(name)

    @override
    @contextlib.contextmanager
    def activity(self, rollout: Rollout, name: str) -> Iterator[None]:
        episode = self._running.get(rollout.episode_id)
        if episode is None:
            yield
            return
        attributes: dict[str, Any] = {"tidegate.rollout.id": rollout.rollout_id}
        kind, _, tool = name.partition(" ")
        if kind == TOOL and tool:
            attributes |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool}
        span = self._spans.start(name, self._parent(episode)[0], attributes=attributes)
        try:
            with trace.use_span(span):  # marks it as failed if an Exception passes
                yield
        finally:
            self._spans.end(span)

    @override
    def ended(self, rollout: Rollout, error: BaseException | None) -> None:
        span = self._running.pop(rollout.rollout_id, None)
        if span is None:
            return
        if isinstance(error, Exception):
            _fail(span, error)
        if span.is_recording():
            attributes: dict[str, Any] = {
                "tidegate.rollout.state": rollout.state.value,
                "tidegate.rollout.discard_reason": rollout.discard_reason,
                "tidegate.reward": rollout.reward,
                "tidegate.turns": len(rollout.turns),
                "tidegate.tokens": rollout.tokens_of_all_rows,
                "tidegate.oldest_version": rollout.oldest_version,
                "tidegate.newest_version": rollout.newest_version,
            }
            span.set_attributes({k: v for k, v in attributes.items() if v is not None})
        self._spans.end(span)

    def close(self) -> None:
        """End the spans of episodes that did not end."""
        for span in self._running.values():
            self._spans.end(span)
        self._running.clear()


def _fail(span: Span, error: BaseException) -> None:
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))


class TrainerSpans(Recorder):
    """Spans ``batch``, until the next batch, and below it ``train``, ``publish``, ``wait`` and
    ``evaluate``: of a run's trainer, or an adapter's."""

    def __init__(self, spans: Spans, *, model: str = "", adapter: str = "") -> None:
        """``model``: the run's model, whose episodes are observed too; empty for an adapter."""
        self._spans = spans
        self._adapter = adapter
        self._episodes = EpisodeSpans(spans, model) if model else None
        if self._episodes is not None:
            self.episode_observers = (self._episodes,)
        self._batch: Span | None = None
        """Span of the newest batch."""
        self._batch_began_ns = 0

    @override
    def trained(
        self,
        rows: Sequence[tuple[Rollout, object]],
        *,
        advantages: Sequence[float],
        consumed_version: int,
    ) -> None:
        links = []
        for (rollout, _), advantage in zip(rows, advantages, strict=True):
            known = self._spans.rollouts.get(rollout.episode_id)
            if known is not None and known.trace_flags.sampled:
                about = {"tidegate.rollout.id": rollout.rollout_id, "tidegate.advantage": advantage}
                links.append(Link(known, about))
        self._end_batch()
        self._batch_began_ns = time.time_ns()
        self._batch = self._spans.start(
            "batch", links=links, attributes=self._about(), start_time=self._batch_began_ns
        )

    @override
    def batch(self, metrics: Mapping[str, float]) -> None:
        if self._batch is not None:
            self._batch.set_attributes({f"tidegate.{name}": metrics[name] for name in metrics})

    @override
    def trainer_interval(
        self, kind: TrainerActivity, started_us: int, ended_us: int, version: int
    ) -> None:
        past_ns = time.time_ns() - time.monotonic_ns()
        attributes = {**self._about(), "tidegate.version": version}
        start_ns, end_ns = (past_ns + 1000 * at_us for at_us in (started_us, ended_us))
        start_ns = max(start_ns, self._batch_began_ns)  # else before its tensors were built
        span = self._spans.start(kind, self._batch, start_time=start_ns, attributes=attributes)
        self._spans.end(span, end_ns)

    def _about(self) -> dict[str, Any]:
        return {"tidegate.adapter": self._adapter} if self._adapter else {}

    def _end_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            self._spans.end(batch)

    @override
    def close(self) -> None:
        self._end_batch()
        if self._episodes is not None:  # the run's own, which is closed last
            self._episodes.close()
            self._spans.close()
