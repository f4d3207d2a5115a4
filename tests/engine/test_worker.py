"""Wire protocol of a real engine process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine.memory.hungry_worker import STEPS_FED
from tests.engine.orchestra import (
    GREEDY,
    LONG,
    PROMPT,
    Models,
    Orchestra,
)
from tests.engine.replaying import assert_replays
from tidegate.engine.worker import main
from tidegate.transport.messages import (
    CANCELLED,
    FINISH_REASONS,
    LENGTH,
    STOP,
    CancelTurn,
    Goodbye,
    Hello,
    HelloRejected,
    MessageRejected,
    OrchestratorHeartbeat,
    Pause,
    Resume,
    SamplingParams,
    Step,
    SubmitTurn,
    TurnFailed,
    TurnsPaused,
    TurnsResumed,
)
from tidegate.transport.sampling import LogitsProcessor
from tidegate.transport.scoring import CancelScore, ScoreFailed, ScoreResult, ScoreTokens

pytestmark = pytest.mark.wire


def test_tokens_are_those_of_the_model_and_name_their_weight_version(
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
    ("prompt", "sampling", "reported"),
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
        ([1] * 512, SamplingParams(max_tokens=1), "none of the model's 512"),
        ([1], SamplingParams(max_tokens=1, min_p=2.0), "min_p must be in [0, 1]"),
        ([1], SamplingParams(max_tokens=1, stop_strings=[""]), "1 to 1000 characters, got 0"),
        ([1], SamplingParams(max_tokens=1, logits_processors=["{}"]), "is no processor"),
    ],
)
def test_a_turn_that_can_never_be_served_is_refused_with_the_reason(
    engine: Orchestra, prompt: list[int], sampling: SamplingParams, reported: str
) -> None:
    turn = engine.submit(prompt, sampling)
    refusal = engine.await_one(TurnFailed)
    assert refusal.turn == turn
    assert reported in refusal.message


def test_an_engine_says_what_its_memory_is_for(engine: Orchestra) -> None:
    engine.generate(PROMPT, GREEDY)
    assert "KV cache: 128 blocks of 16 tokens, 0.0 GiB" in engine.stderr.read_text()


def test_a_long_refusal_message_is_truncated(engine: Orchestra) -> None:
    endless = LogitsProcessor("x" * 100_000).to_str()
    engine.submit(PROMPT, SamplingParams(max_tokens=2, logits_processors=[endless]))
    assert "xxx" in engine.await_one(TurnFailed).message
    assert len(engine.generate(PROMPT, GREEDY).token_ids) == GREEDY.max_tokens


def test_an_engine_decodes_other_turns_while_it_compiles_a_grammar_that_costs_too_much(
    engine: Orchestra,
) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "integer", "multipleOf": 100_000_007}
    costly = LogitsProcessor("json_schema", {"schema": schema}).to_str()
    requested = SamplingParams(max_tokens=9, stop_token_ids=[0], logits_processors=[costly])
    turn = engine.submit(PROMPT, requested)
    other = engine.generate(PROMPT, GREEDY)
    assert len(other.token_ids) == GREEDY.max_tokens
    refused = [each.turn for each in engine.log if isinstance(each, TurnFailed)]
    assert turn not in refused
    assert engine.await_heartbeat().waiting_turns == 1
    refusal = engine.await_one(TurnFailed)
    assert refusal.turn == turn
    assert "compilation took more than" in refusal.message


def test_stop_strings_and_attachments_come_from_a_real_process(engine: Orchestra) -> None:
    sampling = SamplingParams(max_tokens=20, seed=5, top_logprobs=3, raw_logprobs=True)
    whole = engine.generate(PROMPT, sampling)
    text = "".join(chr(31 + token_id) if token_id else "\0" for token_id in whole.token_ids)
    stop = text[4:7]
    end = text.index(stop) + len(stop)
    stopping = msgspec.structs.replace(sampling, stop_strings=["no such", stop])
    stopped = engine.generate(PROMPT, stopping)
    assert (stopped.token_ids, stopped.finish) == (whole.token_ids[:end], STOP)
    assert stopped.logprobs == whole.logprobs[:end]
    reported = [each for step in engine.log if isinstance(step, Step) for each in step.attachments]
    top_ids = [each for each in reported if each.name == "top_ids"][-end:]
    assert [len(each.values) for each in top_ids] == [12] * end
    raw = b"".join([each.values for each in reported if each.name == "raw_logprobs"][-end:])
    # At temperature 1 and without options that matter, both are one.
    np.testing.assert_allclose(np.frombuffer(raw, "<f4"), stopped.logprobs, atol=1e-6)


def test_a_module_of_processors_that_can_t_be_imported_ends_the_engine_with_the_reason(
    models: Models, tmp_path: Path
) -> None:
    options = ["--logits-processors", "no_such_module"]
    with Orchestra(tmp_path, models.directories[0], options) as orchestra:
        assert orchestra.process.wait(60) == 2
        assert "module 'no_such_module'" in orchestra.stderr.read_text()


def test_malformed_frames_are_rejected_without_harm(engine: Orchestra) -> None:
    engine.send_frame(b"\xc1 not MessagePack")
    assert "unreadable" in engine.await_one(MessageRejected).message
    turn = engine.submit(PROMPT, GREEDY)
    engine.send(SubmitTurn(turn=turn + 1_000_000, token_ids=b"\x01\x00\x00", sampling=GREEDY))
    assert "int32" in engine.await_one(TurnFailed).message
    assert engine.finish(turn).finish == LENGTH


def test_batched_submissions_equal_single_ones(engine: Orchestra) -> None:
    alone = engine.generate(PROMPT, GREEDY)
    first, refused, last = engine.submit_together([PROMPT, [], PROMPT], GREEDY)
    assert engine.await_one(TurnFailed).turn == refused
    assert engine.finish(first).token_ids == alone.token_ids
    assert engine.finish(last).token_ids == alone.token_ids


def test_without_credit_no_step_is_made_but_control_is_answered(engine: Orchestra) -> None:
    engine.acknowledges = False
    turn = engine.submit(PROMPT, LONG)
    engine.read_tokens(turn, 4)  # all the credit there is
    steps = engine.steps
    engine.await_heartbeat(2)
    engine.send(Pause(mode="keep"))
    engine.await_one(TurnsPaused)
    assert engine.steps == steps
    engine.acknowledges = True
    engine.acknowledge()
    engine.send(Resume())
    engine.await_one(TurnsResumed)
    engine.read_tokens(turn, 10)
    engine.send(CancelTurn(turn=turn))
    engine.finish(turn)


def test_keep_freezes_turns_and_their_output_is_unchanged(engine: Orchestra) -> None:
    sampling = SamplingParams(max_tokens=40, seed=3)
    undisturbed = engine.generate(PROMPT, sampling)
    turn = engine.submit(PROMPT, sampling)
    engine.read_tokens(turn, 5)
    engine.send(Pause(mode="keep"))
    assert engine.await_one(TurnsPaused).mode == "keep"
    tokens = len(engine.turns[turn].token_ids)
    assert engine.await_heartbeat(2).running_turns == 1
    assert len(engine.turns[turn].token_ids) == tokens
    engine.send(Resume())
    engine.await_one(TurnsResumed)
    assert engine.finish(turn).token_ids == undisturbed.token_ids
    assert [prefill.output_tokens for prefill in engine.turns[turn].prefills] == [0]


def test_abort_ends_turns_before_it_is_answered_and_resubmitting_loses_nothing(
    engine: Orchestra,
) -> None:
    sampling = SamplingParams(max_tokens=40, seed=4)
    undisturbed = engine.generate(PROMPT, sampling)
    turn = engine.submit(PROMPT, sampling)
    engine.read_tokens(turn, 5)
    engine.send(Pause(mode="abort"))
    engine.await_one(TurnsPaused)
    assert FINISH_REASONS[engine.turns[turn].finish] == "abort"
    done = engine.turns[turn].token_ids
    remainder = engine.submit(
        PROMPT + done,
        SamplingParams(max_tokens=40 - len(done), seed=4),
        sampled_before=len(done),
    )
    engine.send(Resume())
    assert done + engine.finish(remainder).token_ids == undisturbed.token_ids


def test_samples_of_one_prompt_share_its_prefill_until_a_pause_clears_the_cache(
    engine: Orchestra,
) -> None:
    prompt = list(range(30, 90))
    group = [engine.submit(prompt, SamplingParams(max_tokens=4, seed=n)) for n in range(4)]
    cached = [engine.finish(turn).prefills[0].cached_tokens for turn in group]
    assert cached == [0, 48, 48, 48]
    assert engine.await_heartbeat(2).free_blocks == 128

    engine.send(Pause(mode="abort", clear_cache=True))
    engine.await_one(TurnsPaused)
    engine.send(Resume())
    assert engine.generate(prompt, GREEDY).prefills[0].cached_tokens == 0


def test_wait_lets_turns_finish_and_starts_none(engine: Orchestra) -> None:
    turn = engine.submit(PROMPT, SamplingParams(max_tokens=30))
    engine.read_tokens(turn, 2)
    engine.send(Pause(mode="wait"))
    late = engine.submit(PROMPT, GREEDY)
    engine.await_one(TurnsPaused)
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
    engine.await_one(TurnsResumed)
    late = engine.submit(PROMPT, GREEDY)
    engine.finish(late)
    assert not any(isinstance(message, TurnsPaused) for message in engine.log[before:])
    engine.send(CancelTurn(turn=turn))
    engine.finish(turn)


def test_an_engine_without_heartbeats_exits(fresh: Orchestra) -> None:
    fresh.welcome(timeout_s=0.5)
    assert "heard nothing" in fresh.await_one(Goodbye).reason
    assert fresh.exit_status() == 0


def test_an_engine_without_memory_for_a_step_says_what_to_lower_and_has_reported_every_token(
    models: Models, tmp_path: Path
) -> None:
    program = "tests.engine.memory.hungry_worker"
    with Orchestra(tmp_path, models.directories[0], program=program) as engine:
        engine.welcome(credit_steps=64)
        turn = engine.submit(PROMPT, GREEDY)
        reason = engine.await_one(Goodbye).reason
        assert reason.startswith("out of memory in a step of 1 turns and 1 tokens; lower max_runn")
        assert engine.exit_status() == 1
        assert engine.stderr.read_text().splitlines()[-1] == f"error: {reason}"
        assert len(engine.turns[turn].token_ids) == STEPS_FED
        assert_replays(turn, engine, {0: models.weights[0]})


@pytest.mark.usefixtures("programs_are_executed")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_engine_with_a_goodbye(fresh: Orchestra, number: int) -> None:
    fresh.welcome()
    turn = fresh.submit(PROMPT, LONG)
    fresh.read_tokens(turn, 1)
    fresh.send(OrchestratorHeartbeat())
    os.kill(fresh.process.pid, number)
    goodbye = fresh.await_one(Goodbye)
    assert goodbye.reason == f"got {signal.Signals(number).name}"
    assert goodbye.is_requested  # so that it is not started again
    assert fresh.exit_status() == 0


def test_a_refused_engine_says_why_and_exits_with_3(fresh: Orchestra) -> None:
    fresh.await_one(Hello)
    fresh.send(HelloRejected(message="another engine has that name"))
    assert fresh.exit_status() == 3
    assert "another engine has that name" in fresh.stderr.read_text()


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (["--model", "no/such/model"], "no/such/model is not a directory"),
        (["--block-tokens", "0"], "block_tokens must be at least 1, got 0"),
        (["--max-step-tokens", "8"], "less than one token for each of max_running_turns=64"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--step-time-min", "2"], "--step-time-min must be between 0 and 1 s, got 2"),
        (["--step-time-min", "nan"], "--step-time-min must be between 0 and 1 s, got nan"),
        (["--connect", "carrier-pigeon"], "carrier-pigeon"),
        (
            ["--num-kv-blocks", str(10**12)],
            "out of memory for a KV cache of 1000000000000 blocks of",
        ),
    ],
)
def test_invalid_options_give_one_line_and_status_2(
    models: Models, capsys: pytest.CaptureFixture[str], options: list[str], reported: str
) -> None:
    usual = ["--engine", "e", "--connect", "ipc:///nowhere", "--model", str(models.directories[0])]
    assert main([*usual, *options]) == 2
    output = capsys.readouterr().err
    assert output.startswith("error: ")
    assert reported in output
    assert output.count("\n") == 1


def test_step_time_min_slows_steps_and_changes_no_token(models: Models, tmp_path: Path) -> None:
    options = ["--step-time-min", "0.03"]
    with Orchestra(tmp_path, models.directories[0], options) as engine:
        engine.welcome()
        turn = engine.submit(PROMPT, GREEDY)
        assert engine.finish(turn).finish == LENGTH
        assert_replays(turn, engine, {0: models.weights[0]})
        steps = [message for message in engine.log if isinstance(message, Step)]
        assert len(steps) == GREEDY.max_tokens
        assert min(step.busy_us for step in steps) >= 30_000


def test_steps_have_no_finish_column_while_no_turn_ends(engine: Orchestra) -> None:
    before = len(engine.log)
    engine.generate(PROMPT, GREEDY)
    steps = [message for message in engine.log[before:] if isinstance(message, Step)]
    assert [step.finish for step in steps] == [b""] * 23 + [bytes([LENGTH])]
    assert all(step.counts == b"" for step in steps)


def test_given_tokens_are_scored_beside_turns_until_a_hello_ends_all_requests(
    fresh: Orchestra, models: Models
) -> None:
    hello = fresh.welcome(credit_steps=1)
    assert hello.score_kinds == ["logprobs", "embedding", "mean_embedding", "hidden_states"]
    turn = fresh.submit(PROMPT, GREEDY)
    fresh.send(ask := ScoreTokens(request_id=0, token_ids=column(PROMPT), start=1, top_logprobs=2))
    assert fresh.finish(turn).token_ids
    first = fresh.await_one(ScoreResult)
    assert (first.request_id, first.version, len(first.logprobs)) == (0, 0, 4 * (len(PROMPT) - 1))

    fresh.send(msgspec.structs.replace(ask, request_id=1, token_ids=column([*PROMPT, 96])))
    assert "token_ids[39] = 96" in fresh.await_one(ScoreFailed).message

    fresh.send(Pause(mode="keep"))
    fresh.await_one(TurnsPaused)
    fresh.send(msgspec.structs.replace(ask, request_id=2))
    fresh.send(CancelScore(request_id=3))
    fresh.send(MessageRejected(message="something was lost"))
    fresh.welcome()  # the pause and request 2 are forgotten with the conversation
    fresh.send(msgspec.structs.replace(ask, request_id=4))
    again = fresh.await_one(ScoreResult)
    assert again.request_id == 4
    scores, same = (np.frombuffer(each.logprobs, "<f4") for each in (first, again))
    np.testing.assert_allclose(same, scores, atol=1e-5)  # the first had the turn's KV to read
    assert fresh.await_heartbeat(2).waiting_turns == 0


def column(token_ids: list[int]) -> bytes:
    return np.array(token_ids, "<i4").tobytes()


@pytest.mark.usefixtures("programs_are_executed")
def test_an_engine_whose_parent_died_before_it_was_noticed_ends_at_once(tmp_path: Path) -> None:
    """The parent is killed while the engine imports torch; otherwise it would wait for ever."""
    stranger = os.getppid()
    command = [sys.executable, "-m", "tidegate.engine.worker", "--die-with-parent", str(stranger)]
    command += ["--connect", f"ipc://{tmp_path}/nobody", "--engine", "orphan"]
    command += ["--model", str(tmp_path / "none")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
