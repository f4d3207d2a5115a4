"""Weight updates of a real engine while turns run, and the KV versions that it reports."""

import threading
from collections.abc import Iterator

import pytest

from tests.engine.orchestra import (
    GREEDY,
    LONG,
    PROMPT,
    TIMEOUT_S,
    Models,
    Orchestra,
    Publisher,
    named_buffers,
)
from tests.engine.replaying import assert_replays
from tidegate.transport.messages import (
    ABORT,
    LENGTH,
    CancelTurn,
    CudaIpcHandle,
    FinishWeightUpdate,
    InitWeights,
    KvPolicy,
    KvSpan,
    MessageRejected,
    Pause,
    PauseMode,
    Prefill,
    Resume,
    SamplingParams,
    StartWeightUpdate,
    TurnsPaused,
    UpdateWeights,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
)
from tidegate.transport.weight_channels.zmq import ZmqSender

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def publisher(engine: Orchestra) -> Iterator[Publisher]:
    publisher = Publisher(engine)
    yield publisher
    publisher.close()


def swap_in_flight(
    engine: Orchestra, publisher: Publisher, models: Models, mode: PauseMode, kv: KvPolicy
) -> tuple[int, int, WeightsLive]:
    """Swap in the other model while a turn runs; return the turn and the boundary
    of the versions."""
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
    """Return the next version number: even ones are the first model, odd ones the second."""
    return engine.await_heartbeat(2).weight_version + 1


def audit(turn: int, engine: Orchestra, models: Models) -> None:
    versions = set(engine.turns[turn].versions)
    versions |= {span.version for p in engine.turns[turn].prefills for span in p.spans}
    assert_replays(turn, engine, {v: models.weights[v % 2] for v in versions})


class HeldSender(ZmqSender):
    """Sender that answers only when the test allows it."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer = threading.Event(), threading.Event()
        super().__init__()

    def _reply(self, peer: bytes, frames: list[bytes]) -> None:
        self.is_asked.set()
        assert self.may_answer.wait(TIMEOUT_S)
        super()._reply(peer, frames)


def test_decoding_continues_while_a_version_is_staged(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    version = next_version(engine)
    sender = HeldSender()
    engine.send(sender.init())
    engine.send(StartWeightUpdate(version=version))
    for update in sender.write(version, named_buffers(models.directories[version % 2])):
        engine.send(update)
    assert sender.is_asked.wait(TIMEOUT_S)
    turn = engine.submit(PROMPT, LONG)
    before = len(engine.log)
    engine.read_tokens(turn, 100)  # a step each: not one of them waits for the copy
    assert not any(isinstance(m, WeightsStaged | WeightsFailed) for m in engine.log[before:])
    sender.may_answer.set()
    assert engine.await_one(WeightsStaged).version == version
    assert set(engine.turns[turn].versions) == {version - 1}
    publisher.swap(version, "abort", "recompute")
    audit(turn, engine, models)
    sender.close()
    engine.send(publisher.init)


def test_an_update_keeping_kv_changes_the_version_between_two_tokens(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    turn, boundary, live = swap_in_flight(engine, publisher, models, "keep", "keep")
    seen = engine.finish(turn)
    old, new = live.version - 1, live.version
    assert 3 <= boundary < 40
    assert seen.versions == [old] * boundary + [new] * (40 - boundary)
    assert [prefill.output_tokens for prefill in seen.prefills] == [0]
    assert live.recomputed_turns == 0
    audit(turn, engine, models)


def test_an_update_recomputing_kv_prefills_the_turn_again_under_the_new_weights(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    turn, boundary, live = swap_in_flight(engine, publisher, models, "keep", "recompute")
    seen = engine.finish(turn)
    assert live.recomputed_turns == 1
    assert [prefill.output_tokens for prefill in seen.prefills] == [0, boundary]
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


def test_turns_ended_by_an_update_are_reported_before_it_even_without_credit(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    version = next_version(engine)
    turn = engine.submit(PROMPT, LONG)
    engine.acknowledges = False
    engine.read_tokens(turn, 4)  # all the credit there is
    publisher.stage(version, models.directories[version % 2])
    engine.send(FinishWeightUpdate(version=version, pause_mode="abort", kv_policy="keep"))
    assert engine.await_heartbeat(3).weight_version == version - 1
    engine.acknowledges = True
    engine.acknowledge()
    assert engine.finish(turn).finish == ABORT
    assert engine.await_one(WeightsLive).version == version


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
    companion = engine.submit(PROMPT, LONG)  # reports each step, and so uses credit
    engine.acknowledges = False
    engine.read_tokens(companion, 4)
    prompt = [90 - n % 90 for n in range(400)]  # nothing that another turn computed
    turn = engine.submit(prompt, SamplingParams(max_tokens=10))
    engine.acknowledge()
    engine.read_tokens(companion, 4)  # four steps, which prefill 31 tokens each
    publisher.stage(version, models.directories[version % 2])
    publisher.swap(version, "keep", "keep")
    engine.acknowledges = True
    engine.acknowledge()
    reported = engine.finish(turn).prefills
    history = [KvSpan(version - 1, 0, 4 * 31), KvSpan(version, 4 * 31, 400)]
    assert reported == [Prefill(turn, 0, history)]
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
    engine.await_one(TurnsPaused)
    boundary = len(engine.turns[turn].token_ids)
    publisher.stage(version, models.directories[version % 2])
    publisher.swap(version, "wait", "keep")
    engine.await_heartbeat(2)
    assert len(engine.turns[turn].token_ids) == boundary
    engine.send(Resume())
    assert engine.finish(turn).versions == [version - 1] * boundary + [version] * (40 - boundary)
    audit(turn, engine, models)


def test_a_failed_update_keeps_the_old_weights_and_a_new_start_succeeds(
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


def test_a_new_start_replaces_staged_weights(
    engine: Orchestra, publisher: Publisher, models: Models
) -> None:
    version = next_version(engine)
    turn = engine.submit(PROMPT, LONG)
    engine.read_tokens(turn, 1)
    engine.acknowledges = False
    publisher.stage(version, models.directories[(version + 1) % 2])
    engine.send(FinishWeightUpdate(version=version, pause_mode="wait", kv_policy="keep"))
    publisher.stage(version, models.directories[version % 2])
    engine.acknowledges = True
    engine.acknowledge()
    engine.send(CancelTurn(turn=turn))
    engine.finish(turn)
    assert engine.await_heartbeat(2).weight_version == version - 1
    publisher.swap(version, "wait", "keep")
    after = engine.submit(PROMPT, GREEDY)
    engine.finish(after)
    audit(after, engine, models)


def test_an_engine_on_the_cpu_refuses_weights_on_a_gpu_and_serves_on(
    engine: Orchestra, publisher: Publisher
) -> None:
    version = next_version(engine)
    engine.send(InitWeights(channel="cuda_ipc", info={"gpu": "GPU-1", "host": "here"}))
    assert "this engine computes on the CPU" in engine.await_one(MessageRejected).message
    engine.send(StartWeightUpdate(version=version))
    memory = CudaIpcHandle("GPU-1", b"\x02c" + bytes(64), 2**40, 0, b"/torch_1_2_3", 7)
    engine.send(UpdateWeights(version=version, location="", tensors=[], ipc_handle=memory))
    failed = engine.await_one(WeightsFailed)
    assert (failed.version, "computes on the CPU" in failed.message) == (version, True)
    assert set(engine.generate(PROMPT, GREEDY).versions) == {version - 1}
    engine.send(publisher.init)
