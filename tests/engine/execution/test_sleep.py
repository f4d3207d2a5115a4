"""Sleep of a real engine process: memory is released, and outputs afterwards are unchanged."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.orchestra import (
    GREEDY,
    PROMPT,
    Models,
    Orchestra,
    Publisher,
    named_buffers,
)
from tests.models import make_model_directory
from tidegate.engine.memory.host_memory import OffloadedBytes, Region
from tidegate.transport.messages import (
    Goodbye,
    Hello,
    Pause,
    PauseMode,
    Resume,
    SamplingParams,
    Shutdown,
    StartWeightUpdate,
    TurnsPaused,
    TurnsResumed,
    WeightsFailed,
)
from tidegate.transport.sleep_messages import (
    MEMORY_TAGS,
    Asleep,
    Awake,
    MemoryTag,
    Sleep,
    SleepLevel,
    SleepRequestFailed,
    Wake,
)

pytestmark = pytest.mark.wire

MIB = 1024 * 1024

WEIGHT_BYTES = 18 * MIB
"""Lower bound of the wide models' weights."""

KV_BYTES = 32 * MIB
"""KV cache of 4096 blocks of 16 tokens, for 2 layers with 2 KV heads of 16, in float32."""

SLACK_BYTES = 2 * MIB
"""Fluctuation of a process's heap."""

SAMPLED = SamplingParams(max_tokens=24, seed=3)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two directories of one model, with enough weights for their release to be measurable."""
    directory = tmp_path_factory.mktemp("wide")
    return [
        make_model_directory(directory / str(seed), "llama", seed=seed, intermediate_size=12_000)
        for seed in range(2)
    ]


@pytest.fixture(scope="module")
def shared_engine(
    wide: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Orchestra]:
    """One process shared by all tests that leave it awake, with the directory's weights."""
    options = ["--num-kv-blocks", "4096", "--max-running-turns", "8"]
    with Orchestra(tmp_path_factory.mktemp("sleeper"), wide[0], options) as orchestra:
        assert orchestra.welcome().sleep_levels == [1, 2]
        yield orchestra
        orchestra.send(Shutdown())
        orchestra.await_one(Goodbye)


def pause(engine: Orchestra, mode: PauseMode = "abort") -> None:
    engine.send(Pause(mode=mode))
    engine.await_one(TurnsPaused)


def resume(engine: Orchestra) -> None:
    engine.send(Resume())
    engine.await_one(TurnsResumed)


def sleep(
    engine: Orchestra, level: SleepLevel = 1, tags: tuple[MemoryTag, ...] = MEMORY_TAGS
) -> Asleep:
    engine.send(Sleep(request_id=7, level=level, tags=list(tags)))
    asleep = engine.await_one(Asleep)
    assert asleep.request_id == 7
    return asleep


def wake(engine: Orchestra, tags: tuple[MemoryTag, ...] = MEMORY_TAGS) -> Awake:
    engine.send(Wake(request_id=8, tags=list(tags)))
    awake = engine.await_one(Awake)
    assert awake.request_id == 8
    return awake


def anonymous_bytes(engine: Orchestra) -> int:
    """Return the resident memory of the engine process without file-backed pages."""
    status = Path(f"/proc/{engine.process.pid}/status").read_text()
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")
    )


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_changes_no_token(
    shared_engine: Orchestra, level: SleepLevel
) -> None:
    undisturbed = shared_engine.generate(PROMPT, SAMPLED)
    before = anonymous_bytes(shared_engine)
    pause(shared_engine)
    asleep = sleep(shared_engine, level)
    assert asleep.tags == ["weights", "kv_cache"]
    assert asleep.freed_bytes > WEIGHT_BYTES + KV_BYTES - SLACK_BYTES
    assert before - anonymous_bytes(shared_engine) > WEIGHT_BYTES + KV_BYTES - SLACK_BYTES
    awake = wake(shared_engine)
    assert (awake.tags, awake.needs_weights) == ([], False)
    resume(shared_engine)
    again = shared_engine.generate(PROMPT, SAMPLED)
    assert again.token_ids == undisturbed.token_ids
    assert again.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-5)
    assert again.prefills[0].cached_tokens == 0


@pytest.mark.parametrize(("tag", "nbytes"), [("weights", WEIGHT_BYTES), ("kv_cache", KV_BYTES)])
def test_one_kind_of_memory_sleeps_without_the_other(
    shared_engine: Orchestra, tag: MemoryTag, nbytes: int
) -> None:
    shared_engine.generate(PROMPT, SAMPLED)
    pause(shared_engine)
    asleep = sleep(shared_engine, tags=(tag,))
    assert asleep.tags == [tag]
    assert nbytes - SLACK_BYTES < asleep.freed_bytes < nbytes + 2 * SLACK_BYTES
    assert sleep(shared_engine).tags == ["weights", "kv_cache"]
    assert wake(shared_engine, (tag,)).tags == [other for other in MEMORY_TAGS if other != tag]
    assert wake(shared_engine).tags == []
    resume(shared_engine)


def test_frozen_turns_whose_kv_slept_are_prefilled_again(shared_engine: Orchestra) -> None:
    undisturbed = shared_engine.generate(PROMPT, SAMPLED)
    turn = shared_engine.submit(PROMPT, SAMPLED)
    shared_engine.read_tokens(turn, 5)
    pause(shared_engine, "keep")
    had = len(shared_engine.turns[turn].token_ids)
    sleep(shared_engine)
    shared_engine.send(Resume())  # runs nothing, for there is nothing to run with
    shared_engine.await_one(TurnsResumed)
    shared_engine.await_heartbeat(2)
    assert len(shared_engine.turns[turn].token_ids) == had
    wake(shared_engine)
    assert shared_engine.finish(turn).token_ids == undisturbed.token_ids
    assert [prefill.output_tokens for prefill in shared_engine.turns[turn].prefills] == [0, had]


def test_frozen_turns_whose_kv_stays_continue_with_it(shared_engine: Orchestra) -> None:
    turn = shared_engine.submit(PROMPT, SAMPLED)
    shared_engine.read_tokens(turn, 5)
    pause(shared_engine, "keep")
    sleep(shared_engine, tags=("weights",))
    wake(shared_engine)
    resume(shared_engine)
    assert [prefill.output_tokens for prefill in shared_engine.finish(turn).prefills] == [0]


def test_turns_submitted_to_a_sleeping_engine_wait_until_it_wakes(shared_engine: Orchestra) -> None:
    pause(shared_engine)
    sleep(shared_engine)
    turn = shared_engine.submit(PROMPT, GREEDY)
    assert shared_engine.await_heartbeat(2).waiting_turns == 1
    wake(shared_engine)
    resume(shared_engine)
    assert len(shared_engine.finish(turn).token_ids) == GREEDY.max_tokens


def test_a_sleep_waits_for_turns_that_its_pause_lets_finish(shared_engine: Orchestra) -> None:
    turn = shared_engine.submit(PROMPT, SAMPLED)
    shared_engine.read_tokens(turn, 2)
    shared_engine.send(Pause(mode="wait"))
    sleep(shared_engine)
    assert len(shared_engine.turns[turn].token_ids) == SAMPLED.max_tokens
    wake(shared_engine)
    resume(shared_engine)


def test_sleep_without_a_pause_is_refused(shared_engine: Orchestra) -> None:
    shared_engine.send(Sleep(request_id=3, level=1, tags=["weights"]))
    failed = shared_engine.await_one(SleepRequestFailed)
    assert (failed.request_id, failed.message.split(",")[0]) == (3, "no pause is in effect")
    assert len(shared_engine.generate(PROMPT, GREEDY).token_ids) == GREEDY.max_tokens


def test_partly_staged_weights_are_dropped_when_weights_sleep(
    shared_engine: Orchestra,
) -> None:
    shared_engine.send(StartWeightUpdate(version=9))
    pause(shared_engine)
    sleep(shared_engine)
    failed = [message for message in shared_engine.log if isinstance(message, WeightsFailed)]
    assert [(f.version, f.message) for f in failed] == [
        (9, "cancelled: the weights were put to sleep")
    ]
    wake(shared_engine)
    resume(shared_engine)


def test_a_reconnecting_engine_reports_its_sleeping_memory(
    shared_engine: Orchestra,
) -> None:
    pause(shared_engine)
    sleep(shared_engine, tags=("kv_cache",))
    shared_engine.break_connection()
    hello = shared_engine.await_one(Hello)
    assert (hello.asleep, hello.needs_weights) == (["kv_cache"], False)
    shared_engine.send_welcome()
    wake(shared_engine)
    assert len(shared_engine.generate(PROMPT, GREEDY).token_ids) == GREEDY.max_tokens


@pytest.fixture
def published(wide: list[Path], tmp_path: Path) -> Iterator[tuple[Orchestra, Publisher]]:
    """A process that serves its own directory's weights as v1, received by an update."""
    with Orchestra(tmp_path, wide[0], ["--num-kv-blocks", "4096"]) as engine:
        engine.welcome()
        publisher = Publisher(engine)
        publisher.stage(1, wide[0])
        publisher.swap(1, "keep", "keep")
        yield engine, publisher
        publisher.close()


def test_discarded_weights_come_back_by_an_update_and_by_nothing_else(
    published: tuple[Orchestra, Publisher], wide: list[Path]
) -> None:
    engine, publisher = published
    turn = engine.submit(PROMPT, SAMPLED)
    engine.read_tokens(turn, 5)
    had = len(engine.turns[turn].token_ids)
    pause(engine, "keep")
    asleep = sleep(engine, 2)
    assert asleep.freed_bytes > 2 * WEIGHT_BYTES + KV_BYTES - SLACK_BYTES
    low = anonymous_bytes(engine)
    assert wake(engine, ("weights",)).needs_weights
    resume(engine)
    publisher.stage(2, wide[1])
    publisher.swap(2, "keep", "keep")
    assert WEIGHT_BYTES - SLACK_BYTES < anonymous_bytes(engine) - low < 1.5 * WEIGHT_BYTES
    assert len(engine.turns[turn].token_ids) <= had + 4  # what came before the pause
    awake = wake(engine)
    assert (awake.tags, awake.needs_weights) == ([], False)
    had = len(engine.turns[turn].token_ids)
    seen = engine.finish(turn)
    assert seen.versions == [1] * had + [2] * (SAMPLED.max_tokens - had)
    assert [p.output_tokens for p in seen.prefills] == [0, had]


def test_an_update_that_does_not_fit_leaves_what_sleeps_asleep(
    published: tuple[Orchestra, Publisher], models: Models
) -> None:
    engine, publisher = published
    undisturbed = engine.generate(PROMPT, SAMPLED)
    pause(engine)
    sleep(engine, 1)
    publisher.send_tensors(2, named_buffers(models.directories[1]))
    engine.await_one(WeightsFailed)
    assert not wake(engine).needs_weights
    resume(engine)
    assert engine.generate(PROMPT, SAMPLED).token_ids == undisturbed.token_ids


def test_weights_that_do_not_fit_on_the_disk_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidegate.engine.memory.host_memory._directory", lambda: Path("/proc/self"))
    with pytest.raises(OSError):  # noqa: PT011 - which one is the system's business
        OffloadedBytes([Region(0, 0)], lambda: None)
