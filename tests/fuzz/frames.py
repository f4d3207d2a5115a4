"""Generator of malformed wire frames from a seed: nearly valid messages with mutations.

Bytes are flipped, cut and spliced; values are replaced by others that a type, range or length check
should refuse. The fuzz targets feed the frames and keep :class:`LiveState` up to date.
"""

import math
import random
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidegate.transport.messages import (
    PROTOCOL,
    Ack,
    Asleep,
    Awake,
    CancelTurn,
    EngineHeartbeat,
    FinishWeightUpdate,
    Goodbye,
    Hello,
    InitWeights,
    KvSpan,
    Message,
    MessageRejected,
    OrchestratorHeartbeat,
    Pause,
    Prefill,
    Resume,
    SamplingParams,
    Sleep,
    SleepRequestFailed,
    StartWeightUpdate,
    Step,
    SubmitTurn,
    SubmitTurns,
    TensorSpec,
    TurnFailed,
    TurnsPaused,
    TurnsResumed,
    UpdateWeights,
    Wake,
    WeightsFailed,
    WeightsLive,
    WeightsStaged,
    Welcome,
    encode,
)

NESTING_MAX = 3000
"""Nesting depth that breaks a recursive decoder; 3 KB."""

LARGE_CHARS = 300_000
"""Length of a string beyond every text limit."""

ODD_VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.5, 1e-45, 1e300, math.nan, math.inf, -math.inf),
    *("", "keep", "abort", "shm", "disk", "x" * 300, "é\0\n\x1b[31m", "../../etc/passwd"),
    *(b"", b"\0", b"\xff" * 4, b"\xff" * 7, bytes(4096)),
    *(None, True, False, [], {}, [[]], [[0, 0, [[]]]], {"kind": "step"}),
)


@dataclass(slots=True)
class LiveState:
    """State that makes frames plausible, kept up to date by the fuzz target."""

    engine: str = "bad"
    epoch: int = 1
    seq: int = 0
    version: int = 0
    vocab_size: int = 1000
    turns: list[int] = field(default_factory=list)
    """Handles of the receiver's current turns."""


class FrameMaker:
    """Endless generator of frames, deterministic for a seed and sequence of states."""

    def __init__(self, seed: int, examples: Sequence[Callable[[LiveState], Message]]) -> None:
        self._chance = random.Random(seed)
        self._examples = examples
        self._mutations: tuple[Callable[[bytes], bytes], ...] = (
            *(self._flip_bits, self._truncate, self._insert, self._splice, self._nest),
            *[self._swap_values] * 3,
        )
        self._last = b"\x80"

    def frame(self, state: LiveState) -> bytes:
        """Return the next frame; most are malformed, some only implausible, a few valid."""
        chance = self._chance
        kind = chance.random()
        if kind < 0.02:
            return chance.randbytes(chance.randrange(200))
        message = chance.choice(self._examples)(state)
        if isinstance(message, Step) and kind < 0.7:
            message = self._odd_step(message, state)
        frame = encode(message)
        if kind < 0.85 and (kind > 0.5 or not isinstance(message, Step)):
            for _ in range(chance.choice((1, 1, 1, 2, 5))):
                frame = self.mutate(frame)
        self._last = frame
        return frame

    def mutate(self, frame: bytes) -> bytes:
        return self._chance.choice(self._mutations)(frame)

    # ------------------------------------------------------------ bytes

    def _flip_bits(self, frame: bytes) -> bytes:
        damaged = bytearray(frame)
        for _ in range(self._chance.choice((1, 2, 8))):
            if damaged:
                damaged[self._chance.randrange(len(damaged))] ^= 1 << self._chance.randrange(8)
        return bytes(damaged)

    def _truncate(self, frame: bytes) -> bytes:
        return frame[: self._chance.randrange(len(frame) + 1)]

    def _insert(self, frame: bytes) -> bytes:
        at = self._chance.randrange(len(frame) + 1)
        return frame[:at] + self._chance.randbytes(self._chance.randrange(1, 9)) + frame[at:]

    def _splice(self, frame: bytes) -> bytes:
        at = self._chance.randrange(len(frame) + 1)
        return frame[:at] + self._last[self._chance.randrange(len(self._last) + 1) :]

    def _nest(self, frame: bytes) -> bytes:
        at = self._chance.randrange(len(frame) + 1)
        opening = self._chance.choice((b"\x91", b"\x81\xa1a", b"\x81\xa4kind"))
        return frame[:at] + opening * self._chance.randrange(1, NESTING_MAX) + frame[at:]

    # ------------------------------------------------------------ values

    def _swap_values(self, frame: bytes) -> bytes:
        try:
            content = msgspec.msgpack.decode(frame)
            if not isinstance(content, dict) or not content:
                return frame
            swap_value(self._chance, content, self._chance.choice(ODD_VALUES))
            return msgspec.msgpack.encode(content)
        except (msgspec.DecodeError, ValueError, RecursionError, TypeError, OverflowError):
            return frame  # damaged too much by an earlier mutation to be decoded

    # ------------------------------------------------------------ steps

    def _odd_step(self, step: Step, state: LiveState) -> Step:
        chance, choice = self._chance, self._chance.choice
        rows = len(step.turns) // 4
        at = chance.randrange(rows) if rows else 0
        token = choice((-1, state.vocab_size, 2**31 - 1, -(2**31)))
        logprob = choice((math.nan, math.inf, -math.inf, 0.5, 1e30))
        longer = choice((1, 3, 40))
        odd: tuple[dict[str, Any], ...] = (
            {"logprobs": _replaced(step.logprobs, "f", at, logprob)},
            {"token_ids": _replaced(step.token_ids, "i", at, token)},
            {"turns": step.turns[:4] * rows},
            {"turns": chance.randbytes(4 * rows)},
            {"counts": struct.pack("<I", choice((0, 2, 2**31, 2**32 - 1))) * rows},
            {  # more tokens than were requested, otherwise consistent
                "counts": struct.pack("<I", longer) * rows,
                "token_ids": step.token_ids * longer,
                "logprobs": step.logprobs * longer,
            },
            {"finish": chance.randbytes(rows + chance.randrange(2))},
            {"version": choice((state.version + 1, 2**62))},
            {"seq": choice((0, state.seq + 1, 2**62))},
            {"prefills": self._odd_prefills(step)},
        )
        return msgspec.structs.replace(step, **choice(odd))

    def _odd_prefills(self, step: Step) -> list[Prefill]:
        handles = array("I", step.turns).tolist() or [0]
        number = [0, 1, 5, 2**62]
        choice = self._chance.choice
        prefills = []
        for _ in range(choice((1, 1, 2, 50))):
            spans = [
                KvSpan(choice(number), choice(number), choice(number))
                for _ in range(choice((0, 1, 1, 3)))
            ]
            handle = choice([*handles, 2**40])
            prefills.append(Prefill(handle, choice(number), spans, choice(number)))
        return prefills


def swap_value(chance: random.Random, content: Any, odd: Any) -> None:
    """Replace, drop or add one value somewhere in a tree of dicts and lists; ``odd``: the value
    that takes the place of most."""
    while True:
        key = chance.choice(list(content) if isinstance(content, dict) else range(len(content)))
        value = content[key]
        if not isinstance(value, dict | list) or not value or chance.random() < 0.4:
            break
        content = value
    action = chance.random()
    if action < 0.0005:
        content[key] = "x" * LARGE_CHARS
    elif action < 0.1 and isinstance(content, dict):
        del content[key]
    elif action < 0.2 and isinstance(content, list):
        content.insert(key, odd)
    elif action < 0.4 and isinstance(value, bytes):
        content[key] = chance.choice(
            (value[:-1], value * 2, value + b"\xff" * 4, b"\xff" * len(value), value[::-1], b"")
        )
    elif action < 0.5 and isinstance(value, int):
        content[key] = max(-(2**63), min(2**64 - 1, value + chance.choice((-1, 1, 2**31))))
    else:
        content[key] = odd


def _replaced(column: bytes, typecode: str, at: int, value: float) -> bytes:
    values: array[Any] = array(typecode, column)
    if values:
        values[at] = value
    return values.tobytes()


# ---------------------------------------------------------------- valid messages to mutate


def hello_of(state: LiveState, weight_version: int = 0) -> Hello:
    return Hello(
        protocol=PROTOCOL,
        engine=state.engine,
        epoch=state.epoch,
        weight_version=weight_version,
        architecture="Qwen3ForCausalLM",
        vocab_size=state.vocab_size,
        context_tokens_max=512,
        max_running_turns=8,
        num_kv_blocks=64,
        block_tokens=16,
        pause_modes=["abort", "keep", "wait"],
        kv_policies=["keep", "recompute"],
        weight_channels=["shm", "disk"],
        turns=array("I", state.turns).tobytes(),
    )


def step_of(state: LiveState, finish: bytes = b"") -> Step:
    """Return the next valid step of all turns, one token each."""
    rows = len(state.turns)
    return Step(
        seq=state.seq,
        version=state.version,
        turns=array("I", state.turns).tobytes(),
        token_ids=array("i", [5] * rows).tobytes(),
        logprobs=array("f", [-0.5] * rows).tobytes(),
        finish=finish,
    )


def _a_turn(state: LiveState) -> int:
    return state.turns[0] if state.turns else 0


def _heartbeat(state: LiveState) -> Message:
    return EngineHeartbeat(
        weight_version=0, running_turns=1, waiting_turns=0, free_blocks=1, sent_us=1
    )


Examples = Sequence[Callable[[LiveState], Message]]

ENGINE_EXAMPLES: Examples = (
    *[step_of] * 6,
    lambda state: step_of(state, finish=b"\1" * len(state.turns)),
    hello_of,
    lambda state: TurnFailed(turn=_a_turn(state), message="no"),
    _heartbeat,
    lambda state: WeightsStaged(version=state.version),
    lambda state: WeightsLive(version=state.version),
    lambda state: WeightsLive(version=2**62),
    lambda state: WeightsFailed(version=state.version, message="no"),
    lambda state: TurnsPaused(mode="keep"),
    lambda state: TurnsResumed(),
    lambda state: Asleep(request_id=1, tags=["weights", "kv_cache"]),
    lambda state: Awake(request_id=1, tags=[], needs_weights=True),
    lambda state: SleepRequestFailed(request_id=1, message="no"),
    lambda state: Goodbye(reason="tired"),
    lambda state: MessageRejected(message="what?"),
)
"""A valid message of each kind from an engine; mostly steps."""


def _submit(state: LiveState) -> Message:
    return _turn(_a_turn(state))


def _submit_together(state: LiveState) -> Message:
    return SubmitTurns(turns=[_turn(_a_turn(state) + apart) for apart in (0, 7, 14)])


def _turn(handle: int) -> SubmitTurn:
    sampling = SamplingParams(max_tokens=4, temperature=0.9, top_k=5, top_p=0.9, seed=3)
    prompt = array("i", [1, 2, 3]).tobytes()
    return SubmitTurn(turn=handle, token_ids=prompt, sampling=sampling)


def _update(state: LiveState) -> Message:
    specs = [TensorSpec("model.norm.weight", "float32", [16], 0, 64)]
    return UpdateWeights(version=state.version + 1, location="/proc/self/fd/0", tensors=specs)


ORCHESTRATOR_EXAMPLES: Examples = (
    *[_submit] * 3,
    _submit_together,
    lambda state: CancelTurn(turn=_a_turn(state)),
    lambda state: Pause(mode="keep"),
    *[lambda state: Resume()] * 3,
    lambda state: Sleep(request_id=1, level=2, tags=["weights", "kv_cache"]),
    *[lambda state: Wake(request_id=1, tags=["weights", "kv_cache"])] * 3,
    lambda state: Ack(seq=state.seq),
    lambda state: Welcome(heartbeat_interval_s=1.0, orchestrator_timeout_s=60.0, credit_steps=64),
    lambda state: OrchestratorHeartbeat(),
    lambda state: InitWeights(channel="shm", info={"path": "/proc/self/fd/0", "inode": 1}),
    lambda state: StartWeightUpdate(version=state.version + 1),
    _update,
    lambda state: FinishWeightUpdate(
        version=state.version + 1, pause_mode="keep", kv_policy="recompute"
    ),
)
"""A valid message of each kind to an engine, except those that end it at once."""
