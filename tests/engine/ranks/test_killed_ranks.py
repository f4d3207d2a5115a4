"""An engine of two ranks, of which one is killed or hangs, and many updates of both."""

import random
import signal
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import psutil
import pytest

from tests.engine.orchestra import LONG, PROMPT, Models, Orchestra, Publisher
from tests.engine.replaying import assert_replays
from tidegate.transport.messages import (
    FinishWeightUpdate,
    Goodbye,
    KvPolicy,
    Pause,
    PauseMode,
    Resume,
    SamplingParams,
    StartWeightUpdate,
    TurnsPaused,
    TurnsResumed,
)

pytestmark = pytest.mark.wire

OPTIONS = ["--max-running-turns", "8", "--max-step-tokens", "32", "--num-kv-blocks", "256"]
OPTIONS += ["--tensor-parallel-size", "2"]

UPDATES: tuple[tuple[PauseMode, KvPolicy], ...] = (
    ("keep", "keep"),
    ("abort", "recompute"),
    ("wait", "recompute"),
    ("keep", "recompute"),
)

CYCLES = 40

HANGS = ("decoding",)
"""Phases in which a hanging rank is tried; each waits 30 s, a collective's timeout."""


@pytest.fixture
def engine(models: Models, tmp_path: Path) -> Iterator[Orchestra]:
    with Orchestra(tmp_path, models.directories[0], OPTIONS) as orchestra:
        orchestra.welcome()
        yield orchestra


def assert_versions(engine: Orchestra, models: Models, turn: int) -> None:
    versions = set(engine.turns[turn].versions)
    assert_replays(turn, engine, {version: models.weights[version % 2] for version in versions})


def test_updates_of_every_kind_keep_both_ranks_in_step(engine: Orchestra, models: Models) -> None:
    publisher, dice, turns = Publisher(engine), random.Random(0), []
    for version, (mode, kv_policy) in zip(range(1, CYCLES + 1), cycle(UPDATES)):
        for _ in range(dice.randint(1, 3)):
            sampling = SamplingParams(max_tokens=dice.randint(8, 40), seed=version)
            turns.append(engine.submit(PROMPT[: dice.randint(3, 39)], sampling))
        engine.read_tokens(turns[-1], 2)
        publisher.stage(version, models.directories[version % 2])
        is_paused = version % 5 in (0, 1)
        if is_paused:
            engine.send(Pause(mode=mode))
            assert engine.await_one(TurnsPaused).mode == mode
        publisher.swap(version, mode, kv_policy)
        if is_paused:
            engine.send(Resume())
            engine.await_one(TurnsResumed)
    for turn in turns:
        engine.finish(turn)
        assert_versions(engine, models, turn)
    assert any(len(set(engine.turns[turn].versions)) > 1 for turn in turns)
    publisher.close()


@pytest.mark.parametrize(
    ("phase", "number"),
    [(phase, signal.SIGKILL) for phase in ("decoding", "pause", "resume", "staging", "swap")]
    + [(phase, signal.SIGSTOP) for phase in HANGS],
)
def test_an_engine_whose_rank_is_killed_or_hangs_says_so_and_ends_with_true_tags(
    engine: Orchestra, models: Models, phase: str, number: signal.Signals
) -> None:
    publisher = Publisher(engine)
    [rank] = psutil.Process(engine.process.pid).children()
    turn = engine.submit(PROMPT, LONG)
    engine.read_tokens(turn, 3)
    publisher.stage(1, models.directories[1])
    publisher.swap(1, "keep", "keep")
    engine.read_tokens(turn, 3)
    match phase:
        case "pause" | "resume":
            engine.send(Pause(mode="keep"))
            if phase == "resume":
                engine.await_one(TurnsPaused)
            rank.send_signal(number)
            engine.send(Resume())
        case "swap":
            publisher.stage(2, models.directories[0])
            rank.send_signal(number)
            engine.send(FinishWeightUpdate(version=2, pause_mode="keep", kv_policy="keep"))
        case "staging":
            engine.send(StartWeightUpdate(version=2))
            rank.send_signal(number)
        case _:
            rank.send_signal(number)
    goodbye = engine.await_one(Goodbye)
    assert goodbye.has_failed
    assert "a rank of this engine of 2 has ended or hangs" in goodbye.reason
    assert engine.exit_status() != 0
    assert not rank.is_running()
    assert_versions(engine, models, turn)
    publisher.close()
