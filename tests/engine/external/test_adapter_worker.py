"""Wire protocol of an external engine's worker, against a double of vLLM.

test_adapter_runs.py checks log-probs over whole runs; this file checks messages and their order.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

import tidegate
from tests.engine.external.vllm_double import VllmDouble
from tests.engine.orchestra import Models, Orchestra, Publisher, SeenTurn
from tidegate.observability.audit.audit import audit_run
from tidegate.transport.messages import (
    ABORT,
    CANCELLED,
    LENGTH,
    CancelTurn,
    FinishWeightUpdate,
    Goodbye,
    KvPolicy,
    KvSpan,
    Pause,
    PauseMode,
    Resume,
    SamplingParams,
    Shutdown,
    TurnFailed,
    TurnsPaused,
    TurnsResumed,
    WeightsFailed,
)

pytestmark = pytest.mark.wire

PROMPT = list(range(1, 40))

PROGRAM = "tidegate.engine.external.worker"

OUTLIVES_IT = SamplingParams(max_tokens=180)

HELD_AT = 60
"""Tokens at which the double holds a request until a test releases it."""


@pytest.fixture(scope="module")
def double(models: Models) -> Iterator[VllmDouble]:
    with VllmDouble(models.directories[0]) as double:
        yield double


@pytest.fixture(scope="module")
def engine(
    models: Models, double: VllmDouble, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Orchestra]:
    """One worker for all tests, which leave it running and without turns."""
    directory = tmp_path_factory.mktemp("adapter")
    options = ["--url", f"vllm+{double.url}", "--stream-interval-tokens", "1"]
    with Orchestra(directory, models.directories[0], options, program=PROGRAM) as orchestra:
        hello = orchestra.welcome(credit_steps=64)
        assert (hello.model_code, hello.vocab_size) == ("vllm 0.32.0", 96)
        assert hello.kv_policies == ["keep", "recompute"]
        yield orchestra
        orchestra.send(Shutdown())
        assert orchestra.await_one(Goodbye).reason == "asked to shut down"
        assert orchestra.exit_status() == 0


@pytest.fixture(scope="module")
def publisher(engine: Orchestra) -> Iterator[Publisher]:
    publisher = Publisher(engine)
    yield publisher
    publisher.close()


@pytest.fixture(autouse=True)
def turns_outlive_what_is_done_meanwhile(double: VllmDouble) -> Iterator[None]:
    never = double.holds
    hold_until_a_call(double)
    yield
    double.holds = never


def hold_until_a_call(double: VllmDouble) -> None:
    reported = len(double.calls)
    double.holds = lambda prompt, sampled, label: (
        sampled >= HELD_AT and len(double.calls) == reported
    )


class Versions:
    """Version numbers for the updates of all tests, each with the weights of one of two models."""

    newest = 0

    @classmethod
    def publish(
        cls, publisher: Publisher, models: Models, mode: PauseMode, kv_policy: KvPolicy
    ) -> int:
        cls.newest += 1
        publisher.stage(cls.newest, models.directories[cls.newest % 2])
        publisher.swap(cls.newest, mode, kv_policy)
        return cls.newest


def runs(turn: SeenTurn) -> list[int]:
    return [version for version, _ in groupby(turn.versions)]


def cancel(engine: Orchestra, turn: int) -> None:
    engine.send(CancelTurn(turn=turn))
    assert engine.finish(turn).finish == CANCELLED


def test_a_turn_ends_as_requested_and_reports_its_prefill_once(engine: Orchestra) -> None:
    turn = engine.generate(PROMPT, SamplingParams(max_tokens=9))
    assert turn.finish == LENGTH
    assert len(turn.token_ids) == 9
    (prefill,) = turn.prefills
    assert (prefill.output_tokens, prefill.spans) == (0, [KvSpan(Versions.newest, 0, len(PROMPT))])


def test_what_an_engine_does_otherwise_is_refused_by_name(engine: Orchestra) -> None:
    for sampling, named in (
        (SamplingParams(max_tokens=3, frequency_penalty=0.5), "frequency_penalty"),
        (SamplingParams(max_tokens=3, logits_processors=["{}"]), "logits_processors"),
        (SamplingParams(max_tokens=3, adapter="a"), "adapter"),
        (SamplingParams(max_tokens=3, top_logprobs=21), "20 top_logprobs at most"),
    ):
        engine.submit(PROMPT, sampling)
        assert named in engine.await_one(TurnFailed).message


def test_a_turn_ends_by_its_length_at_the_end_of_the_models_context(engine: Orchestra) -> None:
    context = [5] * 240
    turn = engine.generate(context, SamplingParams(max_tokens=1000))
    assert turn.finish == LENGTH
    assert len(turn.token_ids) == 256 - len(context)


def test_kept_and_recomputed_turns_continue_with_a_prefill_by_the_new_weights(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    number = engine.submit(PROMPT, OUTLIVES_IT)
    engine.read_tokens(number, 5)
    before = Versions.newest
    version = Versions.publish(publisher, models, "keep", "recompute")
    turn = engine.finish(number)
    assert runs(turn) == [before, version]
    at = turn.versions.index(version)
    assert [(p.output_tokens, p.spans) for p in turn.prefills] == [
        (0, [KvSpan(before, 0, len(PROMPT))]),
        (at, [KvSpan(version, 0, len(PROMPT) + at)]),
    ]
    assert turn.finish == LENGTH
    assert len(turn.token_ids) == OUTLIVES_IT.max_tokens


def test_turns_kept_with_their_kv_are_prefilled_once_and_those_not_begun_anew(
    engine: Orchestra, publisher: Publisher, models: Models, double: VllmDouble
) -> None:
    numbers = [engine.submit(PROMPT, OUTLIVES_IT) for _ in range(10)]  # 8 fit
    engine.read_tokens(numbers[0], 5)
    before = Versions.newest
    version = Versions.publish(publisher, models, "keep", "keep")
    turns = [engine.finish(number) for number in numbers]
    assert runs(turns[0]) == [before, version]
    assert all(len(turn.prefills) == 1 for turn in turns)
    for turn in turns:
        assert turn.prefills[0].spans == [KvSpan(turn.versions[0], 0, len(PROMPT))]
    assert runs(turns[-1]) == [version]
    assert double.calls[-2:] == ["reload", "resume"]


def test_an_abort_hands_turns_back_and_a_drain_waits_for_them(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    number = engine.submit(PROMPT, OUTLIVES_IT)
    engine.read_tokens(number, 5)
    Versions.publish(publisher, models, "abort", "recompute")
    assert engine.turns[number].finish == ABORT
    number = engine.submit(PROMPT, OUTLIVES_IT)
    engine.read_tokens(number, 5)
    before = Versions.newest
    Versions.publish(publisher, models, "wait", "recompute")
    assert engine.turns[number].finish == LENGTH
    assert runs(engine.turns[number]) == [before]


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_pause_is_said_to_be_in_effect_when_no_token_can_come(
    engine: Orchestra, double: VllmDouble, mode: PauseMode
) -> None:
    number = engine.submit(PROMPT, OUTLIVES_IT)
    engine.read_tokens(number, 5)
    engine.send(Pause(mode=mode))
    assert engine.await_one(TurnsPaused).mode == mode
    seen = len(engine.turns[number].token_ids)
    assert double.paused
    later = engine.submit(PROMPT, SamplingParams(max_tokens=3))
    engine.await_heartbeat(2)
    assert len(engine.turns[number].token_ids) == seen
    assert engine.turns[later].token_ids == []
    assert engine.turns[number].finish == (ABORT if mode == "abort" else 0)
    engine.send(Resume())
    engine.await_one(TurnsResumed)
    assert engine.finish(later).finish == LENGTH
    if mode == "keep":
        cancel(engine, number)


def test_a_cancelled_turn_is_aborted_in_the_engine(engine: Orchestra, double: VllmDouble) -> None:
    number = engine.submit(PROMPT, OUTLIVES_IT)
    engine.read_tokens(number, 1)
    cancel(engine, number)
    assert engine.generate(PROMPT, SamplingParams(max_tokens=30)).finish == LENGTH
    engine.await_heartbeat(2)
    assert double.asked == []


def test_labels_that_contradict_the_reported_versions_fail_the_turn(
    engine: Orchestra, double: VllmDouble
) -> None:
    double.mislabels = True
    engine.submit(PROMPT, SamplingParams(max_tokens=4))
    assert "the weights that sampled them are unknown" in engine.await_one(TurnFailed).message
    double.mislabels = False


def test_a_turn_rejected_by_another_clients_pause_runs_after_it(
    engine: Orchestra, double: VllmDouble
) -> None:
    engine.await_heartbeat(2)  # of turns before nothing is left to do
    double.version, double.paused = "0.33.0", "new"
    turned_away = double.turned_away
    number = engine.submit(PROMPT, SamplingParams(max_tokens=3))
    engine.read_until(lambda: double.turned_away > turned_away)
    double.version, double.paused = "0.32.0", ""
    assert engine.finish(number).finish == LENGTH


def test_updates_that_fail_one_after_the_other_leave_what_is_served(
    engine: Orchestra, publisher: Publisher, models: Models, double: VllmDouble
) -> None:
    served = Versions.publish(publisher, models, "keep", "recompute")
    label = double.label
    hold_until_a_call(double)
    number = engine.submit(PROMPT, OUTLIVES_IT)
    engine.read_tokens(number, 2)
    double.fails_to_load = lambda path: label not in path
    for _ in range(3):
        Versions.newest += 1
        publisher.stage(Versions.newest, models.directories[0])
        engine.send(
            FinishWeightUpdate(version=Versions.newest, pause_mode="keep", kv_policy="recompute")
        )
        assert "can't load" in engine.await_one(WeightsFailed).message
    assert runs(engine.finish(number)) == [served]
    assert runs(engine.generate(PROMPT, SamplingParams(max_tokens=3))) == [served]
    double.fails_to_load = lambda path: False
    Versions.publish(publisher, models, "keep", "recompute")  # a whole set mends it


def test_turns_outlast_a_lost_connection(engine: Orchestra, double: VllmDouble) -> None:
    number = engine.submit(PROMPT, OUTLIVES_IT)
    engine.read_tokens(number, 5)
    engine.break_connection()
    engine.welcome(credit_steps=64)
    double.holds = lambda prompt, sampled, label: False
    turn = engine.finish(number)
    assert turn.finish == LENGTH
    assert len(turn.token_ids) == OUTLIVES_IT.max_tokens


def test_kv_is_kept_from_the_second_update_on_by_a_worker_whose_engine_collected_tokens(
    models: Models, tmp_path: Path
) -> None:
    """Collected tokens come without the version that sampled each, so the first update aborts."""
    with VllmDouble(models.directories[0]) as own:
        own.holds = lambda prompt, sampled, label: (
            (sampled >= 30 and label.startswith(("v0.", "v1.")))
            or (sampled >= 60 and label.startswith("v2."))
        )
        options = ["--url", f"vllm+{own.url}"]
        with Orchestra(tmp_path, models.directories[0], options, program=PROGRAM) as orchestra:
            orchestra.welcome(credit_steps=64)
            publisher = Publisher(orchestra)
            turn = orchestra.submit(PROMPT, OUTLIVES_IT)
            orchestra.read_tokens(turn, 17)
            for version, sampled in ((1, 30), (2, 60), (3, 90)):
                _await_sampled(orchestra, own, sampled)
                publisher.stage(version, models.directories[version % 2])
                publisher.swap(version, "keep", "keep")
            seen = orchestra.finish(turn)
            publisher.close()
            assert own.bodies[-2]["sampling_params"]["stream_interval"] == 16
            assert own.bodies[-1]["sampling_params"]["stream_interval"] == 1
    assert seen.versions == [0] * 30 + [1] * 30 + [2] * 30 + [3] * 90
    assert [(p.output_tokens, p.spans[-1].version) for p in seen.prefills] == [(0, 0), (30, 1)]


def _await_sampled(orchestra: Orchestra, double: VllmDouble, tokens: int) -> None:
    """Wait until the only turn has ``tokens`` output tokens in the engine."""
    orchestra.read_until(
        lambda: sum(len(asked.context) for asked in double.asked) == len(PROMPT) + tokens
    )


def test_a_worker_that_gets_a_signal_hands_back_all_tokens_that_its_engine_has_sampled(
    models: Models, tmp_path: Path
) -> None:
    with VllmDouble(models.directories[0]) as own:
        own.holds = lambda prompt, sampled, label: sampled >= HELD_AT
        options = ["--url", f"vllm+{own.url}"]
        with Orchestra(tmp_path, models.directories[0], options, program=PROGRAM) as orchestra:
            orchestra.welcome(credit_steps=64)
            turn = orchestra.submit(PROMPT, OUTLIVES_IT)
            orchestra.read_tokens(turn, 1 + 3 * 16)  # the engine collects 16
            _await_sampled(orchestra, own, HELD_AT)
            os.kill(orchestra.process.pid, signal.SIGTERM)
            goodbye = orchestra.await_one(Goodbye)
            assert (goodbye.reason, goodbye.is_requested) == ("got SIGTERM", True)
            handed_back = orchestra.turns[turn]
            assert (handed_back.finish, len(handed_back.token_ids)) == (ABORT, HELD_AT)
            assert orchestra.exit_status() == 0
        assert own.calls[-2:] == ["pause abort", "resume"]


def test_a_worker_that_gets_a_signal_before_a_pause_is_answered_resumes_its_engine(
    models: Models, tmp_path: Path
) -> None:
    with VllmDouble(models.directories[0]) as own:
        options = ["--url", f"vllm+{own.url}"]
        with Orchestra(tmp_path, models.directories[0], options, program=PROGRAM) as orchestra:
            orchestra.welcome(credit_steps=64)
            own.answers_pauses.clear()
            orchestra.send(Pause(mode="keep"))
            orchestra.read_until(lambda: own.paused == "all")
            os.kill(orchestra.process.pid, signal.SIGTERM)
            orchestra.await_one(Goodbye)
            assert orchestra.exit_status() == 0
        own.answers_pauses.set()
        assert own.calls[-3:] == ["pause keep", "pause abort", "resume"]


async def test_an_external_engine_drains_and_its_turns_continue_on_another(
    models: Models, tmp_path: Path
) -> None:
    """Both servers hold turns of the first task until one server's worker has left."""
    has_left = False

    def holds(prompt: list[int], sampled: int, label: str) -> bool:
        return sampled >= 10 and not has_left

    async def one_turn(episode: tidegate.Episode, task: int) -> float:
        episode.append([5, 6, task])
        turn = await episode.generate(max_tokens=40)
        return float(len(turn.token_ids))

    with VllmDouble(models.directories[0]) as one, VllmDouble(models.directories[0]) as two:
        one.holds = two.holds = holds
        async with tidegate.serve(
            model=models.directories[0],
            engine_urls=[f"vllm+{one.url}", f"vllm+{two.url}"],
            group_size=4,
            groups_per_batch=1,
            run_directory=tmp_path / "run",
            stream_interval_tokens=1,
        ) as rollouts:
            batch = asyncio.ensure_future(anext(rollouts.batches(range(1), episode=one_turn)))
            while min(engine.tokens for engine in rollouts.engines) < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await rollouts.retire("engine-1") > 0
            assert [engine.name for engine in rollouts.engines] == ["engine-0"]
            has_left = True
            assert len((await batch).rewards) == 4
        assert two.calls[-2:] == ["pause abort", "resume"]
    statistics = rollouts.statistics()
    assert statistics.ledger.error == 0
    assert statistics.ledger.generated == statistics.ledger.trained > 0
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
