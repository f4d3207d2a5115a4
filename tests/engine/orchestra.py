"""Test driver of a real engine process: the orchestrator's end of the wire, in bare zmq.

It acknowledges only what it has read, and reads only when asked to. So with few credits the engine
is never more than a few steps ahead of the test, and no test needs to sleep.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import zmq

from tidegate.engine.models.checkpoint import read_tensors
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights
from tidegate.transport import messages
from tidegate.transport.messages import (
    RUNNING,
    Ack,
    EngineHeartbeat,
    FinishWeightUpdate,
    FromEngine,
    Hello,
    InitWeights,
    KvPolicy,
    Message,
    PauseMode,
    Prefill,
    SamplingParams,
    StartWeightUpdate,
    Step,
    SubmitTurn,
    SubmitTurns,
    WeightsLive,
    WeightsStaged,
    Welcome,
)
from tidegate.transport.weight_channels import NamedBuffer, sender

M = TypeVar("M", bound=Message)

TIMEOUT_S = 120.0
"""Seconds after which a missing message fails the test. An engine's start alone has taken a minute,
with twenty others on two processors."""

STORY_MESSAGES = 6
STORY_CHARACTERS_MAX = 300
"""Characters of each message in the error of a test that waited in vain."""

SILENCE_S = 3600.0
"""Orchestrator timeout: the driver sends no heartbeats, and an engine may wait long
for its next test."""

PROMPT = list(range(1, 40))

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)

LONG = SamplingParams(max_tokens=400, seed=7)
"""Outlives whatever a test does meanwhile, because the engine has only a few credits."""


@dataclass(frozen=True, slots=True)
class Models:
    """Two models of one shape: the one served first, and its replacement."""

    directories: list[Path]
    config: ModelConfig
    weights: list[Weights]


@dataclass(slots=True)
class SeenTurn:
    """What the engine reported of one turn."""

    prompt: list[int]
    sampling: SamplingParams
    sampled_before: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    finish: int = RUNNING


class Orchestra:
    """One engine process, and the other end of its wire."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        options: Sequence[str] = (),
        *,
        is_there: bool = True,
        program: str = "tidegate.engine.worker",
    ) -> None:
        self.address = f"ipc://{directory}/wire"
        if is_there:
            self.come_back()
        self.stderr = directory / "stderr"
        command = [sys.executable, "-m", program, "--connect", self.address]
        command += ["--model", str(model), "--engine", "engine-0", *options]
        with self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)
        self._peer = b""
        self.turns: dict[int, SeenTurn] = {}
        self.steps = 0
        self.acknowledges = True
        self.refuses_from: int | None = None
        """Sequence number from which steps are dropped, as if the first of them was unreadable."""
        self.refused = 0
        self.log: list[FromEngine] = []
        """All messages but heartbeats, in order."""
        self._waited_s = 0.0
        """Seconds waited since the last message that was not a heartbeat."""
        self._read_log = 0
        self._next_turn = 0

    def __enter__(self) -> "Orchestra":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        try:
            self.process.wait(TIMEOUT_S)
        finally:
            self.vanish()

    def exit_status(self) -> int:
        """Return the exit status of the process, which is about to end."""
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"engine does not end; {self._story()}") from None

    # ------------------------------------------------------------ the wire

    def welcome(self, *, credit_steps: int = 4, timeout_s: float = SILENCE_S) -> Hello:
        hello = self.await_one(Hello)
        self.send_welcome(credit_steps=credit_steps, timeout_s=timeout_s)
        return hello

    def send_welcome(self, *, credit_steps: int = 4, timeout_s: float = SILENCE_S) -> None:
        self.send(
            Welcome(
                heartbeat_interval_s=0.2,
                orchestrator_timeout_s=timeout_s,
                credit_steps=credit_steps,
            )
        )

    def come_back(self) -> None:
        """Listen again; the engine connects by itself."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)

    def vanish(self) -> None:
        """Drop the engine's connection, and all messages in transit. Harmless if repeated."""
        self._socket.close()
        self._context.term()

    def break_connection(self) -> None:
        """Drop the engine's connection for a moment."""
        self.vanish()
        self.come_back()

    def send(self, message: Message) -> None:
        self.send_frame(messages.encode(message))

    def send_frame(self, frame: bytes) -> None:
        self._socket.send_multipart([self._peer, frame])

    def await_one(self, kind: type[M]) -> M:
        """Read until a message of this kind arrives, and return it."""
        while True:
            while self._read_log < len(self.log):
                message = self.log[self._read_log]
                self._read_log += 1
                if isinstance(message, kind):
                    return message
            self._read_one()

    def read_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._read_one()

    def await_heartbeat(self, count: int = 1) -> EngineHeartbeat:
        """Return the ``count``-th heartbeat from now on."""
        while count > 0:
            self._waited_s = 0.0
            message = self._read_one()
            if isinstance(message, EngineHeartbeat):
                count -= 1
                heartbeat = message
        return heartbeat

    def _read_one(self) -> FromEngine:
        since_s = time.monotonic()
        has_message = self._socket.poll(int(TIMEOUT_S * 1000))
        self._waited_s += time.monotonic() - since_s
        if not has_message or self._waited_s > TIMEOUT_S:
            what = "nothing but heartbeats" if has_message else "nothing"
            raise AssertionError(f"engine sends {what}; {self._story()}")
        self._peer, frame = self._socket.recv_multipart()
        message = messages.decode_from_engine(frame)
        if not isinstance(message, EngineHeartbeat):
            self.log.append(message)
            self._waited_s = 0.0
        if isinstance(message, Step):
            self._take_step(message)
        return message

    def _story(self) -> str:
        """Return the recent messages, for the error of a test that waited in vain."""
        last = [repr(message)[:STORY_CHARACTERS_MAX] for message in self.log[-STORY_MESSAGES:]]
        return "\n  ".join(
            [f"its last messages of {len(self.log)}:", *last, "its log:", self.stderr.read_text()]
        )

    def _take_step(self, step: Step) -> None:
        if self.refuses_from is not None and step.seq >= self.refuses_from:
            self.refused += 1
            return
        if step.seq == self.steps:  # else sent again, or one before it was lost
            self.steps += 1
            self._take_rows(step)
        if self.acknowledges:
            self.acknowledge()

    def _take_rows(self, step: Step) -> None:
        handles = np.frombuffer(step.turns, "<u4").tolist()
        token_ids = iter(np.frombuffer(step.token_ids, "<i4").tolist())
        logprobs = iter(np.frombuffer(step.logprobs, "<f4").tolist())
        counts = np.frombuffer(step.counts, "<u4").tolist() or [1] * len(handles)
        for prefill in step.prefills:
            self.turns[prefill.turn].prefills.append(prefill)
        for handle, count, code in zip(
            handles, counts, step.finish or bytes(len(handles)), strict=True
        ):
            turn = self.turns[handle]
            assert turn.finish == RUNNING
            for _ in range(count):
                turn.token_ids.append(next(token_ids))
                turn.logprobs.append(next(logprobs))
                turn.versions.append(step.version)
            turn.finish = code
        assert next(token_ids, None) is None

    def acknowledge(self) -> None:
        """Return all credit used so far."""
        if self.steps:
            self.send(Ack(seq=self.steps - 1))

    # ------------------------------------------------------------ turns

    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        sampled_before: int = 0,
    ) -> int:
        message = self._new_turn(prompt, sampling, priority, sampled_before)
        self.send(message)
        return message.turn

    def submit_together(self, prompts: list[list[int]], sampling: SamplingParams) -> list[int]:
        """Submit several turns in one message."""
        turns = [self._new_turn(prompt, sampling) for prompt in prompts]
        self.send(SubmitTurns(turns=turns))
        return [message.turn for message in turns]

    def _new_turn(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        priority: int = 0,
        sampled_before: int = 0,
    ) -> SubmitTurn:
        turn = self._next_turn
        self._next_turn += 1
        self.turns[turn] = SeenTurn(prompt, sampling, sampled_before)
        return SubmitTurn(
            turn=turn,
            token_ids=np.array(prompt, "<i4").tobytes(),
            sampling=sampling,
            priority=priority,
            sampled_before=sampled_before,
        )

    def finish(self, turn: int) -> SeenTurn:
        """Read until the turn has ended."""
        self.read_until(lambda: self.turns[turn].finish != RUNNING)
        return self.turns[turn]

    def generate(self, prompt: list[int], sampling: SamplingParams) -> SeenTurn:
        return self.finish(self.submit(prompt, sampling))

    def read_tokens(self, turn: int, count: int) -> None:
        """Read until ``count`` more tokens of a turn have arrived."""
        enough = len(self.turns[turn].token_ids) + count
        self.read_until(lambda: len(self.turns[turn].token_ids) >= enough)


class Publisher:
    """Publishes the weights of model directories through shared memory."""

    def __init__(self, orchestra: Orchestra) -> None:
        self._orchestra = orchestra
        self._sender = sender("shm", None)
        orchestra.send(self._sender.init())

    @property
    def init(self) -> InitWeights:
        return self._sender.init()

    def stage(self, version: int, directory: Path) -> WeightsStaged:
        """Phases 2 and 3, while turns continue."""
        self.send_tensors(version, named_buffers(directory))
        return self._orchestra.await_one(WeightsStaged)

    def send_tensors(self, version: int, tensors: list[NamedBuffer]) -> None:
        self._orchestra.send(StartWeightUpdate(version=version))
        for update in self._sender.write(version, tensors):
            self._orchestra.send(update)

    def swap(self, version: int, mode: PauseMode, kv_policy: KvPolicy) -> WeightsLive:
        """Phase 4: swap, and wait until the version is live."""
        self._orchestra.send(
            FinishWeightUpdate(version=version, pause_mode=mode, kv_policy=kv_policy)
        )
        return self._orchestra.await_one(WeightsLive)

    def close(self) -> None:
        self._sender.close()


def named_buffers(directory: Path) -> list[NamedBuffer]:
    """Return a directory's tensors as a trainer would publish them."""
    return [
        NamedBuffer(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.contiguous().numpy().data.cast("B"),
        )
        for name, tensor in read_tensors(directory)
    ]
