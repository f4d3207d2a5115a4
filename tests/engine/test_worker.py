"""Does a real engine process keep the wire's promises?"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.orchestra import Orchestra, Publisher, named_buffers, replay
from tests.models import make_model_directory
from tidegate.engine.model_config import ModelConfig
from tidegate.engine.weights import Weights, load_directory
from tidegate.engine.worker import main
from tidegate.transport.messages import (
    ABORT,
    CANCELLED,
    FINISH_REASONS,
    LENGTH,
    STOP,
    CancelTurn,
    Complaint,
    FinishWeightUpdate,
    Goodbye,
    Hello,
    KvPolicy,
    KvSpan,
    OrchestratorHeartbeat,
    Pause,
    Paused,
    PauseMode,
    Prefill,
    Refused,
    Resume,
    Resumed,
    SamplingParams,
    Shutdown,
    StartWeightUpdate,
    Step,
    SubmitTurn,
    TurnRefused,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
)

PROMPT = list(range(1, 40))
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
LONG = SamplingParams(max_tokens=400, seed=7)
"""Outlives all that the tests do meanwhile, for the engine has only a few credits."""


@dataclass(frozen=True, slots=True)
class Models:
    """Two models of one shape: what is served first, and what replaces it."""

    directories: list[Path]
    config: ModelConfig
    weights: list[Weights]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    directories = [
        make_model_directory(tmp_path_factory.mktemp("model") / str(seed), seed=seed)
        for seed in range(2)
    ]
    config = ModelConfig.from_directory(directories[0])
    weights = [load_directory(path, config, torch.float32) for path in directories]
    return Models(directories, config, weights)


@pytest.fixture(scope="module")
def engine(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orchestra]:
    """One process for all tests that leave it as they found it: running, with no turns."""
    options = ["--max-running-turns", "8", "--max-step-tokens", "32", "--num-blocks", "128"]
    directory = tmp_path_factory.mktemp("engine")
    with Orchestra(directory, models.directories[0], options) as orchestra:
        hello = orchestra.welcome()
        assert (hello.engine, hello.num_blocks, hello.vocab_size) == ("engine-0", 128, 96)
        yield orchestra
        orchestra.send(Shutdown())
        assert orchestra.await_one(Goodbye).reason == "asked to shut down"
        assert orchestra.process.wait() == 0


@pytest.fixture
def fresh(models: Models, tmp_path: Path) -> Iterator[Orchestra]:
    """A process of one test's own."""
    with Orchestra(tmp_path, models.directories[0]) as orchestra:
        yield orchestra


@pytest.fixture(scope="module")
def publisher(engine: Orchestra) -> Iterator[Publisher]:
    publisher = Publisher(engine)
    yield publisher
    publisher.close()


def assert_replays(turn: int, engine: Orchestra, weights: dict[int, Weights]) -> None:
    """The version audit: each token again, from the weights that its provenance names."""
    seen = engine.turns[turn]
    config = next(iter(weights.values())).config
    again = replay(seen, weights, config)
    assert again.token_ids == seen.token_ids
    np.testing.assert_allclose(again.logprobs, seen.logprobs, atol=1e-4)


def test_tokens_are_those_of_the_model_and_say_who_sampled_them(
    engine: Orchestra, models: Models
) -> None:
    turns = [
        engine.submit(PROMPT[: 5 + 7 * n], SamplingParams(max_tokens=20, seed=n, top_p=0.9))
        for n in range(5)
    ]
    for turn in turns:
        assert engine.finish(turn).finish == LENGTH
        assert len(engine.turns[turn].token_ids) == 20
        assert_replays(turn, engine, {0: models.weights[0]})


def test_a_stop_token_ends_a_turn_and_is_its_last_token(engine: Orchestra) -> None:
    first = engine.generate(PROMPT, GREEDY)
    stop = first.token_ids[5]
    sampling = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=[stop])
    stopped = engine.generate(PROMPT, sampling)
    end = first.token_ids.index(stop) + 1
    assert (stopped.token_ids, stopped.finish) == (first.token_ids[:end], STOP)


def test_a_cancelled_turn_ends_at_once_and_says_so(engine: Orchestra) -> None:
    turn = engine.submit(PROMPT, LONG)
    engine.read_tokens(turn, 3)
    engine.send(CancelTurn(turn=turn))
    engine.send(CancelTurn(turn=123_456))
    assert engine.finish(turn).finish == CANCELLED
    assert engine.await_heartbeat(2).free_blocks == 128


@pytest.mark.parametrize(
    ("prompt", "sampling", "told"),
    [
        ([], GREEDY, "token_ids is empty"),
        ([3, 96], GREEDY, "token_ids[1] = 96 is outside the model's vocabulary [0, 96)"),
        ([-1], GREEDY, "token_ids[0] = -1 is outside"),
        ([1], SamplingParams(max_tokens=0), "max_tokens must be at least 1, got 0"),
        ([1], SamplingParams(max_tokens=1, temperature=-0.5), "got -0.5"),
        ([1], SamplingParams(max_tokens=1, temperature=float("nan")), "got nan"),
        ([1], SamplingParams(max_tokens=1, top_p=0.0), "top_p must be in (0, 1]"),
        ([1], SamplingParams(max_tokens=1, top_p=1.5), "got 1.5"),
        ([1], SamplingParams(max_tokens=1, top_k=-2), "top_k must be in [0, 2147483647]"),
        ([1], SamplingParams(max_tokens=1, top_k=2**63), "got 9223372036854775808"),
        ([1], SamplingParams(max_tokens=2**40), "context of 512 tokens"),
    ],
)
def test_a_turn_that_can_never_be_served_is_refused_with_the_reason(
    engine: Orchestra, prompt: list[int], sampling: SamplingParams, told: str
) -> None:
    turn = engine.submit(prompt, sampling)
    refusal = engine.await_one(TurnRefused)
    assert refusal.turn == turn
    assert told in refusal.message


def test_bytes_that_are_no_message_are_answered_and_harm_nobody(engine: Orchestra) -> None:
    engine.send_frame(b"\xc1 not MessagePack")
    assert "unreadable" in engine.await_one(Complaint).message
    turn = engine.submit(PROMPT, GREEDY)
    engine.send(SubmitTurn(turn=turn + 1_000_000, token_ids=b"\x01\x00\x00", sampling=GREEDY))
    assert "int32" in engine.await_one(TurnRefused).message
    assert engine.finish(turn).finish == LENGTH


def test_without_credit_no_step_is_made_but_control_is_answered(engine: Orchestra) -> None:
    engine.acknowledges = False
    turn = engine.submit(PROMPT, LONG)
    engine.read_tokens(turn, 4)  # all the credit there is
    steps = engine.steps
    engine.await_heartbeat(2)
    engine.send(Pause(mode="keep"))
    engine.await_one(Paused)
    assert engine.steps == steps
    engine.acknowledges = True
    engine.acknowledge()
    engine.send(Resume())
    engine.await_one(Resumed)
    engine.read_tokens(turn, 10)
    engine.send(CancelTurn(turn=turn))
    engine.finish(turn)


def test_keep_freezes_turns_and_they_go_on_as_if_nothing_had_been(engine: Orchestra) -> None:
    sampling = SamplingParams(max_tokens=40, seed=3)
    undisturbed = engine.generate(PROMPT, sampling)
    turn = engine.submit(PROMPT, sampling)
    engine.read_tokens(turn, 5)
    engine.send(Pause(mode="keep"))
    assert engine.await_one(Paused).mode == "keep"
    tokens = len(engine.turns[turn].token_ids)
    assert engine.await_heartbeat(2).running_turns == 1
    assert len(engine.turns[turn].token_ids) == tokens
    engine.send(Resume())
    engine.await_one(Resumed)
    assert engine.finish(turn).token_ids == undisturbed.token_ids
    assert [prefill.at for prefill in engine.turns[turn].prefills] == [0]


def test_abort_ends_turns_before_it_is_answered_and_resubmitting_loses_nothing(
    engine: Orchestra,
) -> None:
    sampling = SamplingParams(max_tokens=40, seed=4)
    undisturbed = engine.generate(PROMPT, sampling)
    turn = engine.submit(PROMPT, sampling)
    engine.read_tokens(turn, 5)
    engine.send(Pause(mode="abort"))
    engine.await_one(Paused)
    assert FINISH_REASONS[engine.turns[turn].finish] == "abort"
    done = engine.turns[turn].token_ids
    rest = engine.submit(
        PROMPT + done,
        SamplingParams(max_tokens=40 - len(done), seed=4),
        sampled_before=len(done),
    )
    engine.send(Resume())
    assert done + engine.finish(rest).token_ids == undisturbed.token_ids


def test_wait_lets_turns_finish_and_starts_none(engine: Orchestra) -> None:
    turn = engine.submit(PROMPT, SamplingParams(max_tokens=30))
    engine.read_tokens(turn, 2)
    engine.send(Pause(mode="wait"))
    late = engine.submit(PROMPT, GREEDY)
    engine.await_one(Paused)
    assert engine.turns[turn].finish == LENGTH
    assert engine.await_heartbeat(2).waiting_turns == 1
    assert engine.turns[late].token_ids == []
    engine.send(Resume())
    assert engine.finish(late).finish == LENGTH


def test_resume_lifts_a_wait_that_is_not_in_effect_yet(engine: Orchestra) -> None:
    turn = engine.submit(PROMPT, LONG)
    engine.read_tokens(turn, 2)
    engine.send(Pause(mode="wait"))
    engine.send(Resume())
    before = len(engine.log)
    engine.await_one(Resumed)
    late = engine.submit(PROMPT, GREEDY)
    engine.finish(late)
    assert not any(isinstance(message, Paused) for message in engine.log[before:])
    engine.send(CancelTurn(turn=turn))
    engine.finish(turn)


def test_abort_ends_turns_that_an_earlier_pause_froze(engine: Orchestra) -> None:
    turn = engine.submit(PROMPT, LONG)
    engine.read_tokens(turn, 2)
    engine.send(Pause(mode="keep"))
    engine.await_one(Paused)
    engine.send(Pause(mode="abort"))
    assert engine.await_one(Paused).mode == "abort"
    assert engine.turns[turn].finish == ABORT
    engine.send(Resume())
    engine.await_one(Resumed)


def swap_in_flight(
    engine: Orchestra, publisher: Publisher, models: Models, mode: PauseMode, kv: KvPolicy
) -> tuple[int, int, WeightsLive]:
    """Bring the other model in while a turn runs; return the turn and the versions' boundary."""
    version = next_version(engine)
    sampling = SamplingParams(max_tokens=40, seed=version)
    turn = engine.submit(PROMPT, sampling)
    engine.read_tokens(turn, 3)
    engine.acknowledges = False  # so that it can't finish before the swap
    publisher.stage(version, models.directories[version % 2])
    engine.acknowledges = True
    engine.acknowledge()
    live = publisher.swap(version, mode, kv)
    boundary = len(engine.turns[turn].token_ids)
    assert live.version == version
    return turn, boundary, live


def next_version(engine: Orchestra) -> int:
    """Even versions are the first model, odd ones the second."""
    return engine.await_heartbeat(2).weight_version + 1


def audit(turn: int, engine: Orchestra, models: Models) -> None:
    versions = set(engine.turns[turn].versions)
    versions |= {span.version for p in engine.turns[turn].prefills for span in p.spans}
    assert_replays(turn, engine, {v: models.weights[v % 2] for v in versions})


def test_an_update_keeping_kv_changes_the_version_between_two_tokens(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    turn, boundary, live = swap_in_flight(engine, publisher, models, "keep", "keep")
    seen = engine.finish(turn)
    old, new = live.version - 1, live.version
    assert 3 <= boundary < 40
    assert seen.versions == [old] * boundary + [new] * (40 - boundary)
    assert [prefill.at for prefill in seen.prefills] == [0]
    assert live.recomputed_turns == 0
    audit(turn, engine, models)


def test_an_update_recomputing_kv_prefills_the_turn_again_under_the_new_weights(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    turn, boundary, live = swap_in_flight(engine, publisher, models, "keep", "recompute")
    seen = engine.finish(turn)
    assert live.recomputed_turns == 1
    assert [prefill.at for prefill in seen.prefills] == [0, boundary]
    assert seen.prefills[1].spans == [KvSpan(live.version, 0, len(PROMPT) + boundary)]
    audit(turn, engine, models)


def test_an_update_with_abort_hands_back_the_turn_before_the_new_weights_are_live(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    turn, boundary, live = swap_in_flight(engine, publisher, models, "abort", "recompute")
    seen = engine.turns[turn]
    assert seen.finish == ABORT
    assert seen.versions == [live.version - 1] * boundary
    assert engine.generate(PROMPT, GREEDY).versions == [live.version] * 24


def test_an_update_with_wait_lets_the_turn_finish_under_the_old_weights(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    turn, _, live = swap_in_flight(engine, publisher, models, "wait", "keep")
    assert engine.turns[turn].finish == LENGTH
    assert engine.turns[turn].versions == [live.version - 1] * 40
    assert engine.generate(PROMPT, GREEDY).versions == [live.version] * 24


def test_a_prompt_prefilled_across_a_swap_says_whose_weights_computed_which_part(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    version = next_version(engine)
    companion = engine.submit(PROMPT, LONG)  # tells of each step, and so uses credit
    engine.acknowledges = False
    engine.read_tokens(companion, 4)
    prompt = [1 + n % 90 for n in range(400)]
    turn = engine.submit(prompt, SamplingParams(max_tokens=10))
    engine.acknowledge()
    engine.read_tokens(companion, 4)  # four steps, which prefill 31 tokens each
    publisher.stage(version, models.directories[version % 2])
    publisher.swap(version, "keep", "keep")
    engine.acknowledges = True
    engine.acknowledge()
    told = engine.finish(turn).prefills
    history = [KvSpan(version - 1, 0, 4 * 31), KvSpan(version, 4 * 31, 400)]
    assert told == [Prefill(turn, 0, history)]
    audit(turn, engine, models)
    engine.send(CancelTurn(turn=companion))
    engine.finish(companion)
    audit(companion, engine, models)


def test_weights_swapped_while_paused_leave_the_engine_paused(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    version = next_version(engine)
    turn = engine.submit(PROMPT, SamplingParams(max_tokens=40))
    engine.read_tokens(turn, 3)
    engine.send(Pause(mode="keep"))
    engine.await_one(Paused)
    boundary = len(engine.turns[turn].token_ids)
    publisher.stage(version, models.directories[version % 2])
    publisher.swap(version, "wait", "keep")
    engine.await_heartbeat(2)
    assert len(engine.turns[turn].token_ids) == boundary
    engine.send(Resume())
    assert engine.finish(turn).versions == [version - 1] * boundary + [version] * (40 - boundary)
    audit(turn, engine, models)


def test_a_failed_update_leaves_the_old_weights_and_a_fresh_start_mends_it(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    version = next_version(engine)
    directory = models.directories[version % 2]
    publisher.send_tensors(version, named_buffers(directory)[:-1])
    assert "1 tensors are missing" in engine.await_one(WeightsFailed).message
    engine.send(FinishWeightUpdate(version=version, pause_mode="keep", kv_policy="keep"))
    assert "is not staged here" in engine.await_one(WeightsFailed).message
    assert engine.generate(PROMPT, GREEDY).versions == [version - 1] * 24
    publisher.stage(version, directory)
    publisher.swap(version, "keep", "keep")
    assert engine.generate(PROMPT, GREEDY).versions == [version] * 24


def test_an_update_never_started_is_refused(engine: Orchestra) -> None:
    engine.send(UpdateWeights(version=999, location="nowhere", tensors=[]))
    assert "v999 was not started" in engine.await_one(WeightsFailed).message


def test_a_version_started_over_another_says_that_the_other_failed(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    version = next_version(engine)
    engine.send(StartWeightUpdate(version=900))
    publisher.send_tensors(version, named_buffers(models.directories[version % 2]))
    assert engine.await_one(WeightsFailed).version == 900
    assert engine.await_one(WeightsStaged).version == version
    publisher.swap(version, "keep", "recompute")


def test_no_version_is_started_over_one_that_waits_to_be_swapped_in(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    version = next_version(engine)
    turn = engine.submit(PROMPT, LONG)
    engine.read_tokens(turn, 1)
    engine.acknowledges = False
    publisher.stage(version, models.directories[version % 2])
    engine.send(FinishWeightUpdate(version=version, pause_mode="wait", kv_policy="keep"))
    engine.send(StartWeightUpdate(version=900))
    failed = engine.await_one(WeightsFailed)
    assert failed.version == 900
    assert f"v{version} still waits to be swapped in" in failed.message
    engine.acknowledges = True
    engine.acknowledge()
    engine.send(CancelTurn(turn=turn))
    assert engine.await_one(WeightsLive).version == version


def test_after_a_lost_connection_the_engine_says_hello_and_repeats_what_was_not_acknowledged(
    fresh: Orchestra, models: Models
) -> None:
    first = fresh.welcome()
    fresh.acknowledges = False
    turn = fresh.submit(PROMPT, GREEDY)
    fresh.read_tokens(turn, 2)
    fresh.await_heartbeat()  # by now all the credit is used
    fresh.break_connection()
    assert fresh.await_one(Hello) == first
    fresh.acknowledges = True
    assert len(fresh.finish(turn).token_ids) == 24
    assert_replays(turn, fresh, {0: models.weights[0]})


def test_an_engine_that_hears_nothing_leaves(fresh: Orchestra) -> None:
    fresh.welcome(timeout_s=0.5)
    assert "heard nothing" in fresh.await_one(Goodbye).reason
    assert fresh.process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_engine_with_a_goodbye(fresh: Orchestra, number: int) -> None:
    fresh.welcome()
    turn = fresh.submit(PROMPT, LONG)
    fresh.read_tokens(turn, 1)
    fresh.send(OrchestratorHeartbeat())
    os.kill(fresh.process.pid, number)
    assert fresh.await_one(Goodbye).reason == f"got {signal.Signals(number).name}"
    assert fresh.process.wait() == 0


def test_a_refused_engine_says_why_and_exits_with_3(fresh: Orchestra) -> None:
    fresh.await_one(Hello)
    fresh.send(Refused(message="another engine has that name"))
    assert fresh.process.wait() == 3
    assert "another engine has that name" in fresh.stderr.read_text()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "no/such/model"], "no/such/model is not a directory"),
        (["--block-tokens", "0"], "block_tokens must be at least 1, got 0"),
        (["--max-step-tokens", "8"], "less than one token for each of max_running_turns=64"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--connect", "carrier-pigeon"], "carrier-pigeon"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(
    models: Models, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    usual = ["--engine", "e", "--connect", "ipc:///nowhere", "--model", str(models.directories[0])]
    assert main([*usual, *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert told in said
    assert said.count("\n") == 1


def test_steps_carry_no_finish_column_while_every_turn_goes_on(engine: Orchestra) -> None:
    before = len(engine.log)
    engine.generate(PROMPT, GREEDY)
    steps = [message for message in engine.log[before:] if isinstance(message, Step)]
    assert [step.finish for step in steps] == [b""] * 23 + [bytes([LENGTH])]
    assert all(step.counts == b"" for step in steps)
