"""OpenTelemetry spans of runs, by its own SDK. ``make test-trackers`` installs the packages."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory
from tests.orchestrator.episodes.chat_templates import add_chat_template, chat_tokenizer
from tidegate.errors import ConfigError
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.simulation.run import serve as simulated
from tidegate.testing import ServeInTests

SMALL: dict[str, Any] = {"group_size": 1, "groups_per_batch": 2}

MODULE = "tests.observability.traced_tools"

REMOTE_TRACE = "0af7651916cd43dd8448eb211c80319c"
REMOTE_SPAN = "b7ad6b7169203331"


def started(span: Any) -> int:
    return int(span.start_time)


class Exported:
    """A tracer provider as a user sets one, and the spans that it has exported."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.memory = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.memory))

    def named(self, name: str) -> list[Any]:
        """Return the spans of this name, in order of their start."""
        spans = [span for span in self.memory.get_finished_spans() if span.name == name]
        return sorted(spans, key=started)

    def children(self, parent: Any) -> list[str]:
        """Return the names of the spans directly below another, in order of their start."""
        spans = sorted(self.memory.get_finished_spans(), key=started)
        of = parent.context.span_id
        return [each.name for each in spans if each.parent and each.parent.span_id == of]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry: make test-trackers")
    from opentelemetry import trace

    exported = Exported()
    # The global provider can be set once per process.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", exported.provider)
    return exported


@pytest.fixture
def observed(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> Exported:
    """The spans of simulated runs, which have no recorder of their own."""
    from tidegate.observability.spans import Spans, TrainerSpans

    recorder = TrainerSpans(Spans(), model="scripted")
    observing = partial(Scheduler, observers=recorder.episode_observers)
    monkeypatch.setattr(simulated, "Scheduler", observing)
    monkeypatch.setattr(simulated.SimulatedRun, "recorder", recorder)
    return exported


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = make_model_directory(
        tmp_path / "model", vocab_size=chat_tokenizer().get_vocab_size(), dtype="float32"
    )
    return add_chat_template(path, "chatml")


@pytest.fixture
def gateway() -> Iterator[tidegate.Gateway]:
    gateway = tidegate.Gateway(token="master")
    yield gateway
    gateway.close()


async def one_turn(episode: tidegate.Episode, task: Any) -> float:
    episode.append([5, 6, 7])
    await episode.generate(max_tokens=4)
    return 0.5


# ---------------------------------------------------------------- scripted engines


async def test_a_rollout_is_a_trace_with_its_turns_and_tools_and_a_batch_links_to_it(
    observed: Exported, tidegate_serve: ServeInTests
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([task, 1])
        with episode.activity("tool search"):
            await episode.generate(max_tokens=3)
        episode.append([2])
        await episode.generate(max_tokens=3)
        return 0.5

    async with tidegate_serve(says="abcdefgh", **SMALL) as rollouts:
        async for _ in rollouts.batches(range(2), episode=solve):
            pass

    episodes = observed.named("rollout")
    assert [span.parent for span in episodes] == [None, None]
    assert episodes[0].context.trace_id != episodes[1].context.trace_id
    for number, span in enumerate(episodes):
        assert observed.children(span) == ["tool search", "turn"]
        assert span.attributes["tidegate.rollout.id"] == number
        assert span.attributes["tidegate.reward"] == 0.5
        assert span.attributes["tidegate.turns"] == 2
        assert span.attributes["tidegate.tokens"] == 6
        assert span.attributes["tidegate.resumed"] is False
        assert span.status.is_ok or span.status.is_unset
    (tool, *_) = observed.named("tool search")
    assert tool.attributes["gen_ai.tool.name"] == "search"
    assert observed.children(tool) == ["turn"]
    inner, outer = [
        span for span in observed.named("turn") if span.context.trace_id == tool.context.trace_id
    ]
    assert dict(inner.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tidegate",
        "gen_ai.request.model": "scripted",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "tidegate.rollout.id": 0,
        "tidegate.turn": 0,
        "tidegate.engines": ("engine-0",),
        "tidegate.versions": (0,),
    }
    assert outer.attributes["gen_ai.usage.input_tokens"] == 6

    (batch,) = observed.named("batch")
    assert {link.context.span_id for link in batch.links} == {
        span.context.span_id for span in episodes
    }
    assert batch.links[0].attributes["tidegate.advantage"] == 0.0
    assert batch.attributes["tidegate.version"] == 0
    assert batch.attributes["tidegate.staleness_mean"] == 0.0


async def test_a_turn_that_spans_a_swap_has_both_versions(
    observed: Exported, tidegate_serve: ServeInTests
) -> None:
    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append([task])
        return float(len((await episode.generate(max_tokens=60)).token_ids))

    async with tidegate_serve(says="a" * 60, **SMALL) as rollouts:
        evaluation = asyncio.ensure_future(rollouts.evaluate([1], episode=solve))
        await asyncio.sleep(0.2)
        await rollouts.publish({})
        await evaluation
    (turn,) = observed.named("turn")
    assert turn.attributes["tidegate.versions"] == (0, 1)
    (rollout,) = observed.named("rollout")
    assert rollout.attributes["tidegate.oldest_version"] == 0
    assert rollout.attributes["tidegate.newest_version"] == 1
    assert rollout.attributes["tidegate.evaluation"] is True


async def test_an_episode_that_raises_is_an_error_with_what_it_raised(
    observed: Exported, tidegate_serve: ServeInTests
) -> None:
    async def fails(episode: tidegate.Episode, task: int) -> float:
        if task == 0:
            with episode.activity("tool search"):
                raise LookupError("no such door")
        return await one_turn(episode, task)

    async with tidegate_serve(says="abcdefgh", **SMALL) as rollouts:
        await rollouts.evaluate(range(2), episode=fails)
    (tool,) = observed.named("tool search")
    failed, returned = observed.named("rollout")
    assert returned.status.is_unset
    for span in (tool, failed):
        assert not span.status.is_ok
        assert span.status.description == "LookupError: no such door"
        assert span.events[0].attributes["exception.message"] == "no such door"


async def test_a_timeout_is_the_error_of_an_attempt_and_the_next_one_links_to_it(
    observed: Exported, tidegate_serve: ServeInTests
) -> None:
    async def hangs_once(episode: tidegate.Episode, task: int) -> float:
        if not episode.retries:
            await asyncio.Event().wait()
        return await one_turn(episode, task)

    async with tidegate_serve(says="abcdefgh", **SMALL, episode_timeout_s=5.0) as rollouts:
        await rollouts.evaluate([1], episode=hangs_once)
    late, retried = observed.named("rollout")
    assert late.status.description == "EpisodeTimedOut: the episode exceeded its timeout"
    assert retried.status.is_unset
    assert [span.attributes["tidegate.rollout.retries"] for span in (late, retried)] == [0, 1]
    assert [link.context.span_id for link in retried.links] == [late.context.span_id]
    assert [span.attributes["tidegate.resumed"] for span in (late, retried)] == [False, False]


async def test_spans_that_cannot_be_made_or_ended_do_not_end_the_run(
    observed: Exported,
    tidegate_serve: ServeInTests,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from opentelemetry.sdk.trace import SpanProcessor

    def fail_to_start(span: Any, parent_context: object = None) -> None:
        if span.name == "turn":
            raise ZeroDivisionError

    def fail_to_end(span: object) -> None:
        raise ZeroDivisionError

    broken = SpanProcessor()
    monkeypatch.setattr(broken, "on_start", fail_to_start)
    monkeypatch.setattr(broken, "on_end", fail_to_end)
    observed.provider.add_span_processor(broken)
    async with tidegate_serve(says="abcdefgh", **SMALL) as rollouts:
        async for batch in rollouts.batches(range(2), episode=one_turn):
            assert batch.rewards.tolist() == [0.5, 0.5]
    assert "a span could not be started" in caplog.text
    assert "a span could not be ended" in caplog.text


async def test_rollouts_that_are_not_sampled_cost_no_attributes_and_no_links(
    monkeypatch: pytest.MonkeyPatch, tidegate_serve: ServeInTests, observed: Exported
) -> None:
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    monkeypatch.setattr(simulated.SimulatedRun.recorder._spans._tracer, "sampler", ALWAYS_OFF)  # type: ignore[attr-defined]
    async with tidegate_serve(says="abcdefgh", **SMALL) as rollouts:
        async for _ in rollouts.batches(range(2), episode=one_turn):
            pass
    assert observed.memory.get_finished_spans() == ()


# ---------------------------------------------------------------- other processes


@pytest.mark.wire
async def test_tools_and_environments_in_worker_processes_are_called_in_the_rollouts_trace(
    model: Path, exported: Exported
) -> None:
    with tidegate.EnvironmentPool(processes=1) as pool:
        names = ("find", "search", "fail")
        tools = tidegate.Tools(pool, {name: f"{MODULE}:{name}" for name in names})
        maze = pool.environment(f"{MODULE}:Maze")
        seen: list[str] = []

        async def solve(episode: tidegate.Episode, task: int) -> float:
            seen.extend([await tools.call("find", {}), await tools.call("search", {})])
            assert "no such door" in await tools.call("fail", {})
            environment = maze()
            seen.append((await environment.reset(seed=0, task=None)).text)
            seen.append((await environment.step("left")).text)
            environment.close()
            return await one_turn(episode, task)

        async with tidegate.serve(model=model, opentelemetry=True, **SMALL) as rollouts:
            await rollouts.evaluate([1], episode=solve)
        outside = await tools.call("find", {})
    (rollout,) = exported.named("rollout")
    assert seen == [f"{rollout.context.trace_id:032x}"] * 4
    assert outside == "0" * 32
    assert exported.children(rollout) == ["tool find", "tool search", "tool fail", "turn"]
    (failed,) = exported.named("tool fail")
    assert "LookupError: no such door" in failed.status.description
    assert exported.named("tool find")[0].status.is_unset


@pytest.mark.wire
async def test_the_gateway_continues_the_rollouts_trace_and_links_to_others(
    model: Path, exported: Exported, gateway: tidegate.Gateway
) -> None:
    from opentelemetry import propagate

    parents: list[str] = []

    async def ask(endpoint: tidegate.Endpoint, headers: dict[str, str]) -> None:
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, default_headers=headers
        ) as client:
            messages: Any = [{"role": "user", "content": "hm?"}]
            await client.chat.completions.create(model="m", messages=messages, max_tokens=3)

    async def agent(endpoint: tidegate.Endpoint, task: int) -> float:
        with exported.provider.get_tracer("agent").start_as_current_span("client") as client:
            headers: dict[str, str] = {}
            propagate.inject(headers)  # as instrumented clients do
            parents.append(f"{client.get_span_context().span_id:016x}")
            await ask(endpoint, headers)
        await ask(endpoint, {})
        await ask(endpoint, {"traceparent": f"00-{REMOTE_TRACE}-{REMOTE_SPAN}-01"})
        return 0.5

    async with tidegate.serve(model=model, opentelemetry=True, **SMALL) as rollouts:
        for _ in range(2):  # the gateway's server begins in the first one's task
            await rollouts.evaluate([1], episode=gateway.episode(agent))
    episodes, turns = exported.named("rollout"), exported.named("turn")
    for number, rollout in enumerate(episodes):
        of = f"{rollout.context.span_id:016x}"
        own = turns[3 * number : 3 * number + 3]
        assert [f"{turn.parent.span_id:016x}" for turn in own] == [parents[number], of, of]
        assert [len(turn.links) for turn in own] == [0, 0, 1]
        assert f"{own[2].links[0].context.trace_id:032x}" == REMOTE_TRACE
        assert exported.children(rollout) == ["client", "turn", "turn"]


@pytest.mark.wire
async def test_agents_in_threads_and_in_other_processes_get_the_rollouts_trace(
    model: Path, exported: Exported, gateway: tidegate.Gateway
) -> None:
    from opentelemetry import trace

    seen = []

    def agent(endpoint: tidegate.Endpoint, task: int) -> float:
        seen.append(trace.get_current_span().get_span_context().trace_id)
        return 0.5

    async def claim() -> None:
        async with httpx.AsyncClient(headers={"Authorization": "Bearer master"}) as client:
            session = (await client.post(f"{gateway.url}/sessions")).json()
            seen.append(int(session["traceparent"].split("-")[1], 16))
            url = f"{gateway.url}/sessions/{session['id']}/reward"
            await client.post(url, json={"reward": 1.0})

    async with tidegate.serve(model=model, opentelemetry=True, **SMALL) as rollouts:
        await rollouts.evaluate([1], episode=gateway.episode(agent))
        await asyncio.gather(rollouts.evaluate([2], episode=gateway.episode()), claim())
    assert seen == [span.context.trace_id for span in exported.named("rollout")]


@pytest.mark.wire
async def test_an_episode_that_a_resumed_run_continues_begins_another_span_that_says_so(
    model: Path, exported: Exported, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**SMALL, "groups_per_batch": 1, "max_staleness": 1}
    settings |= {"model": model, "run_directory": tmp_path / "run", "journal": True}
    settings |= {"just_in_time_after_versions": None, "opentelemetry": True}
    halfway, is_first = threading.Event(), True

    async def two_turns(episode: tidegate.Episode, task: int) -> float:
        await one_turn(episode, task)
        if is_first and task == 1:
            halfway.set()
            await asyncio.Event().wait()
        return await one_turn(episode, task)

    async with tidegate.serve(**settings) as rollouts:
        async for _ in rollouts.batches(range(3), episode=two_turns):
            state = rollouts.state_dict()
            assert await asyncio.to_thread(halfway.wait, 60)
            break
    is_first = False
    before = len(exported.named("rollout"))
    async with tidegate.serve(resume=state, **settings) as rollouts:
        await rollouts.publish(load_file(model / "model.safetensors"))
        async for batch in rollouts.batches(range(3), episode=two_turns):
            if 1 in batch.tasks:
                break
    continued, *_ = exported.named("rollout")[before:]
    assert continued.attributes["tidegate.resumed"] is True
    assert continued.attributes["tidegate.turns"] == 2
    assert exported.children(continued) == ["turn"]  # the other one is of the run before
    earlier = exported.named("rollout")[:before]
    assert not any(span.attributes["tidegate.resumed"] for span in earlier)
    assert [span.attributes["tidegate.rollout.state"] for span in earlier][1] == "running"


# ---------------------------------------------------------------- OTLP


class Collector(ThreadingHTTPServer):
    """A collector on loopback: keeps the bodies that it receives, and what asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receive)
        self.received: list[tuple[str, bytes]] = []
        self.status = 200


class _Receive(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, body))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry: make test-trackers")
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{collector.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        yield collector
        collector.shutdown()
        thread.join()


@pytest.mark.wire
async def test_without_a_provider_spans_go_to_the_collector_that_the_environment_names(
    model: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    request: Any = trace_service_pb2.ExportTraceServiceRequest
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-training")
    async with tidegate.serve(model=model, opentelemetry=True, **SMALL) as rollouts:
        async for _ in rollouts.batches(range(4), episode=one_turn):
            await rollouts.publish(load_file(model / "model.safetensors"))
    spans = []
    for path, body in collector.received:
        assert path == "/v1/traces"
        for resource in request.FromString(body).resource_spans:
            about = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert about["service.name"] == "my-training"
            for scope in resource.scope_spans:
                assert scope.scope.name == "tidegate"
                spans += scope.spans
    by_id = {span.span_id: span for span in spans}
    assert [span.name for span in spans].count("rollout") == 4
    turns = [span for span in spans if span.name == "turn"]
    assert [by_id[turn.parent_span_id].name for turn in turns] == ["rollout"] * 4
    batches = [span for span in spans if span.name == "batch"]
    linked = [by_id[link.span_id].name for batch in batches for link in batch.links]
    assert linked == ["rollout"] * 4
    for batch in batches:
        below = [span for span in spans if span.parent_span_id == batch.span_id]
        assert {"train", "publish"} <= {span.name for span in below}
        assert all(
            batch.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            for span in below
        )


@pytest.mark.wire
async def test_a_collector_that_fails_costs_spans_and_does_not_delay_the_end_of_a_run(
    model: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.status = 503
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")  # no export before the end
    monkeypatch.setattr("tidegate.observability.spans.LAST_EXPORT_S", 0.0)
    async with tidegate.serve(model=model, opentelemetry=True, **SMALL) as rollouts:
        async for batch in rollouts.batches(range(2), episode=one_turn):
            assert batch.rewards.tolist() == [0.5, 0.5]
    assert len(collector.received) <= 1


async def test_the_setting_names_the_extra_where_the_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "tidegate.observability.spans", raising=False)
    monkeypatch.delattr("tidegate.observability.spans", raising=False)
    with pytest.raises(ConfigError, match=r"missing: pip install 'tidegate\[opentelemetry\]'"):
        async with tidegate.serve(model=make_model_directory(tmp_path), opentelemetry=True):
            pass
