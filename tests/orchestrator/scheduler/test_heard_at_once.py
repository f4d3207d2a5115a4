"""Messages read together are judged as if read one by one."""

import math
from array import array
from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from tests.orchestrator.fleet.test_fleet import Wire, hello
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.fleet.fleet import EngineReply
from tidegate.transport.messages import Message, MessageRejected, Step, encode

VOCAB_SIZE = 96
ROWS = 64
"""More tokens than are checked as lists."""

SEEDS = 1000

Frames = list[tuple[bytes, bytes]]


def step(seq: int) -> Step:
    return Step(
        seq=seq,
        version=0,
        turns=array("I", range(ROWS)).tobytes(),
        token_ids=array("i", [VOCAB_SIZE - 1] * ROWS).tobytes(),
        logprobs=array("f", [-0.5] * ROWS).tobytes(),
    )


def with_id(said: Step, at: int, token_id: int) -> Step:
    token_ids = array("i", said.token_ids)
    token_ids[at] = token_id
    return replace(said, token_ids=token_ids.tobytes())


def with_logprob(said: Step, at: int, logprob: float) -> Step:
    logprobs = array("f", said.logprobs)
    logprobs[at] = logprob
    return replace(said, logprobs=logprobs.tobytes())


DAMAGES: list[Callable[[Step, int], Message]] = [
    lambda said, at: with_id(said, at, VOCAB_SIZE),
    lambda said, at: with_id(said, at, -1),
    lambda said, at: with_logprob(said, at, math.nan),
    lambda said, at: with_logprob(said, at, 0.5),
    lambda said, at: replace(said, token_ids=said.token_ids[: 4 * at + 2]),
    lambda said, at: replace(said, token_ids=said.token_ids + b"\0\0"),
    lambda said, at: replace(said, logprobs=said.logprobs[4:]),
    lambda said, at: replace(said, logprobs=said.logprobs + b"\0\0"),
    lambda said, at: replace(said, token_ids=b"", logprobs=b"", turns=b""),
    lambda said, at: replace(said, seq=said.seq + at),
    # The same engine as a new process, of a model whose vocabulary is smaller: its steps are too.
    lambda said, at: hello("a", epoch=2, vocab=VOCAB_SIZE - at % 2),
]


def some_frames(random: Random) -> Frames:
    frames: Frames = []
    for seq in range(random.randrange(2, 8)):
        said: Message = step(seq)
        if random.random() < 0.3:
            said = random.choice(DAMAGES)(step(seq), random.randrange(ROWS))
        frame = encode(said)
        if random.random() < 0.05:
            frame = frame[: random.randrange(len(frame))]
        frames.append((random.choice([b"a", b"a", b"b", b"nobody"]), frame))
    return frames


def received(
    batches: list[Frames], engines: str = "a"
) -> tuple[list[ev.Event | EngineReply], list[tuple[bytes, Message]]]:
    """Return the events and the messages sent for these frames, from engines that have joined."""
    wire = Wire()
    for name in engines:
        wire.hear(hello(name, vocab=VOCAB_SIZE), peer=name.encode())
    wire.sent.clear()
    items = [item for batch in batches for item in wire.fleet.receive(batch, wire.now_s)]
    assert wire.fleet.malformed_frames >= sum(isinstance(m, MessageRejected) for _, m in wire.sent)
    return items, wire.sent


def test_frames_read_at_once_mean_what_they_mean_one_by_one() -> None:
    for seed in range(SEEDS):
        random = Random(seed)
        frames, engines = some_frames(random), random.choice(["a", "ab"])
        one_by_one = [[frame] for frame in frames]
        assert received([frames], engines) == received(one_by_one, engines), seed


def test_a_column_that_is_cut_does_not_have_others_read_where_they_are_not() -> None:
    token_ids = array("i", [0] * ROWS).tobytes()
    half, other_half = token_ids[:-2], token_ids[:2]
    cut = replace(step(0), token_ids=half, logprobs=half)
    second_half = replace(step(0), token_ids=other_half, logprobs=other_half)
    bad = with_id(replace(step(0), token_ids=token_ids), 8, 1 << 16)  # from its middle on: 1
    _, answers = received([[(b"a", encode(said)) for said in (cut, bad, second_half)]])
    assert ["token_ids[8]" in str(said) for _, said in answers] == [False, True, False]
