"""Simulated engine that speaks the wire protocol but computes nothing.

It has slots, a queue, steps in columns, credits and weight updates like a real engine. A turn is
answered with the same tokens each time, after a configured time. ``wire_engines.py`` and
``in_process.py`` run it. Sans-IO: no socket and no clock, so one process, or the orchestrator's
own, can run a thousand of them. Built on the wire's messages and ``transport/streams.py``.
"""

import argparse
import time
from array import array
from collections import deque
from collections.abc import Callable

from tidegate.transport.messages import (
    LENGTH,
    PROTOCOL,
    RUNNING,
    Ack,
    AdapterLive,
    AdapterLoaded,
    EngineHeartbeat,
    FinishWeightUpdate,
    FromOrchestrator,
    Hello,
    LoadAdapter,
    Message,
    Shutdown,
    Step,
    SubmitTurn,
    SubmitTurns,
    SwapAdapter,
    UpdateWeights,
    WeightsLive,
    WeightsStaged,
    Welcome,
    encode,
)
from tidegate.transport.streams import SendWindow

VOCAB_SIZE = 4096


def add_work_options(parser: argparse.ArgumentParser) -> None:
    """Add the engines' workload as command-line options."""
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--slots", type=int, default=64, help="turns that an engine runs at once")
    parser.add_argument("--tokens", type=int, default=64, help="per turn")
    parser.add_argument("--steps", type=int, default=4, help="step messages per turn")
    parser.add_argument("--turn-s", type=float, default=0.008, help="time that a turn takes")
    parser.add_argument("--step-s", type=float, default=0.002, help="between two steps")


class FakeEngine:
    """One engine: slots, a queue, and turns with known due times."""

    def __init__(
        self, number: int, work: argparse.Namespace, send: Callable[[bytes], object]
    ) -> None:
        self.name = f"engine-{number}"
        self.has_ended = False
        """Whether the engine was sent ``Shutdown``."""
        self._send_frame = send
        self._slots: int = work.slots
        self._steps: int = work.steps
        self._turn_s: float = work.turn_s
        self._step_s: float = work.step_s
        self._phase_s: float = work.step_s * number / work.engines
        """Offset of this engine's steps, so that engines do not step in unison."""
        tokens = work.tokens // work.steps
        self._token_ids = array("i", range(tokens)).tobytes()
        self._logprobs = array("f", [-1.0] * tokens).tobytes()
        self._count = array("I", [tokens]).tobytes() if tokens > 1 else b""
        self._window = SendWindow(1)
        self._version = 0
        self._adapters: dict[str, int] = {}
        """Live version of each LoRA adapter."""
        self._adapter_of: dict[int, str] = {}
        """Adapter of each turn that has one."""
        self._waiting: deque[int] = deque()
        self._due: deque[tuple[float, int, int]] = deque()
        """(due time, turn, steps left), earliest first, because the interval is the same for
        all."""

    @property
    def due_s(self) -> float | None:
        """When the next step is due; None while there is no work, or no credit."""
        return self._due[0][0] if self._due and self._window.is_open else None

    def start(self) -> None:
        """Send the hello."""
        self._send(
            Hello(
                protocol=PROTOCOL,
                engine=self.name,
                epoch=time.time_ns(),
                weight_version=0,
                architecture="Benchmark",
                vocab_size=VOCAB_SIZE,
                context_tokens_max=1 << 20,
                max_running_turns=self._slots,
                num_kv_blocks=1 << 20,  # contexts are as long as they like
                block_tokens=16,
                pause_modes=["keep"],
                kv_policies=["keep", "recompute"],
                weight_channels=["shm"],
                supports_submit_turns=True,
                adapters_max=16,
            )
        )

    def receive(self, message: FromOrchestrator, now_s: float) -> None:
        """Process one message."""
        match message:
            case SubmitTurn():
                self._submit(message)
                self._fill_slots(now_s)
            case SubmitTurns(turns=turns):
                for submitted in turns:
                    self._submit(submitted)
                self._fill_slots(now_s)
            case Ack(seq=seq):
                self._window.acknowledge(seq)
            case Welcome(credit_steps=credit_steps):
                self._window = SendWindow(credit_steps)
            case UpdateWeights(version=version):
                self._send(WeightsStaged(version=version))
            case FinishWeightUpdate(version=version):
                self._version = version
                self._send(WeightsLive(version=version))
            case LoadAdapter(name=name, version=version):
                self._send(AdapterLoaded(name=name, version=version))
            case SwapAdapter(name=name, version=version):
                self._adapters[name] = version
                self._send(AdapterLive(name=name, version=version))
            case Shutdown():
                self.has_ended = True

    def _submit(self, submitted: SubmitTurn) -> None:
        self._waiting.append(submitted.turn)
        if submitted.sampling.adapter:
            self._adapter_of[submitted.turn] = submitted.sampling.adapter

    def step(self, now_s: float) -> None:
        """Send everything due as one step message, or one for each adapter."""
        rows: dict[str, tuple[array[int], bytearray]] = {}
        due = self._due
        for _ in range(len(due)):
            if due[0][0] > now_s:
                break
            _, turn, left = due.popleft()
            adapter = self._adapter_of.get(turn, "")
            turns, finish = rows.setdefault(adapter, (array("I"), bytearray()))
            turns.append(turn)
            finish.append(LENGTH if left == 1 else RUNNING)
            if left > 1:
                due.append((self._step_after(now_s), turn, left - 1))
            elif adapter:
                del self._adapter_of[turn]
        self._fill_slots(now_s)
        for adapter, (turns, finish) in rows.items():
            self._send_step(adapter, turns, finish)

    def _send_step(self, adapter: str, turns: "array[int]", finish: bytearray) -> None:
        rows = len(turns)
        seq = self._window.next_seq()
        message = Step(
            seq=seq,
            version=self._adapters[adapter] if adapter else self._version,
            adapter=adapter,
            turns=turns.tobytes(),
            token_ids=self._token_ids * rows,
            logprobs=self._logprobs * rows,
            finish=bytes(finish) if any(finish) else b"",
            counts=self._count * rows,
            busy_us=1,
        )
        self._window.sent(seq, self._send(message))

    def send_heartbeat(self) -> None:
        """Send a heartbeat."""
        self._send(
            EngineHeartbeat(
                weight_version=self._version,
                running_turns=len(self._due),
                waiting_turns=len(self._waiting),
                free_blocks=0,
                sent_us=time.monotonic_ns() // 1000,
            )
        )

    def _fill_slots(self, now_s: float) -> None:
        while self._waiting and len(self._due) < self._slots:
            self._due.append((self._step_after(now_s), self._waiting.popleft(), self._steps))

    def _step_after(self, now_s: float) -> float:
        """Return the engine's step time closest to one interval from now, which is exact on
        average."""
        if not self._turn_s:
            return now_s
        steps = round((now_s + self._turn_s / self._steps - self._phase_s) / self._step_s)
        return steps * self._step_s + self._phase_s

    def _send(self, message: Message) -> bytes:
        frame = encode(message)
        self._send_frame(frame)
        return frame
