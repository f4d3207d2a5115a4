"""Fuzz target: a real engine loop on a thread, with a tiny model, fed by a hostile orchestrator.

The model has one tiny layer of random weights; everything else, the socket included, is a worker's
code. The engine may exit by design, for example on Shutdown; then it is restarted.
"""

import threading
import time
import traceback
from array import array
from pathlib import Path

import torch
import zmq

from tests.fuzz.frames import ORCHESTRATOR_EXAMPLES, FrameMaker, LiveState, hello_of
from tidegate.engine.execution.runner import ModelRunner
from tidegate.engine.execution.sleep import SleepController
from tidegate.engine.link import OrchestratorLink
from tidegate.engine.loop import EngineLoop
from tidegate.engine.models.model_config import AttentionKind, LayerShape, ModelConfig
from tidegate.engine.models.model_weights import Weights
from tidegate.engine.models.rope_config import Rope
from tidegate.engine.scheduling.scheduler import EngineScheduler
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.engine.weights.staging import Staging
from tidegate.errors import TidegateError
from tidegate.transport.dealer import DealerSocket
from tidegate.transport.messages import (
    Ack,
    FromEngine,
    Hello,
    Message,
    Resume,
    SamplingParams,
    Shutdown,
    Step,
    SubmitTurn,
    Welcome,
    decode_from_engine,
    encode,
)

TIMEOUT_S = 60.0
"""Timeout after which an engine that has not read its frames counts as hung."""

FRAMES_AHEAD_MAX = 2000
"""Maximum number of unread frames, far below the socket's limits, so that none is lost."""

LIMITS = EngineLimits(
    max_running_turns=8,
    max_step_tokens=64,
    num_blocks=64,
    block_tokens=16,
    context_tokens_max=256,
    vocab_size=50,
)

_CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=50,
    hidden_size=16,
    intermediate_size=16,
    layers=(LayerShape(attention=AttentionKind(rope=Rope(theta=10_000.0))),),
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    norm_epsilon=1e-6,
    context_tokens_max=256,
    tied_head=True,
)


class FuzzedEngine:
    """An engine, and the hostile orchestrator that it is connected to. Close it after use."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.frames = 0
        self.starts = self.steps = 0
        self.failures: list[str] = []
        """Tracebacks of unexpected deaths."""
        self.malformed = 0
        self._maker = FrameMaker(seed, ORCHESTRATOR_EXAMPLES)
        self._state = LiveState(vocab_size=LIMITS.vocab_size, turns=[1])
        self._address = f"ipc://{directory}/engine"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.bind(self._address)
        self._start()

    def feed(self) -> bytes:
        """Send one fuzzed frame, which is read a little later; return it."""
        frame = self._maker.frame(self._state)
        self._state.turns[0] = self.frames % 7
        self.frames += 1
        self._send(frame)
        if self.frames % 50 == 0:
            self._send(encode(Resume()))
            self._receive()
        if self._sent - self._read > FRAMES_AHEAD_MAX:
            self.settle()
        return frame

    def settle(self) -> None:
        """Wait until the engine has read all frames; restart it if it has ended."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while self._thread.is_alive() and self._read < self._sent:
            self._receive()
            if time.monotonic() > deadline_s:
                raise AssertionError(f"the engine has read {self._read} of {self._sent} frames")
            self._router.poll(1)
        if not self._thread.is_alive():
            self._restart()

    def still_serves(self) -> bool:
        self._restart()
        self._submit(4_000_000_000)
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            for message in self._receive():
                if isinstance(message, Step) and 4_000_000_000 in array("I", message.turns):
                    return True
            self._router.poll(10)
        return False

    def close(self) -> None:
        self._end()
        self._router.close()
        self._context.term()

    # ------------------------------------------------------------ the orchestrator's end

    @property
    def _read(self) -> int:
        statistics = self._socket.statistics()
        return statistics.frames + statistics.malformed

    def _send(self, frame: bytes) -> None:
        self._router.send_multipart([self._name, frame])
        self._sent += 1

    def _submit(self, turn: int) -> None:
        prompt = array("i", [1, 2, 3]).tobytes()
        sampling = SamplingParams(max_tokens=2)
        self._send(encode(SubmitTurn(turn=turn, token_ids=prompt, sampling=sampling)))

    def _receive(self) -> list[FromEngine]:
        """Read the engine's messages; welcome it, and acknowledge its steps."""
        received: list[FromEngine] = []
        while self._router.poll(0):
            peer, *frames = self._router.recv_multipart()
            if peer != self._name:  # last messages of a previous engine
                continue
            message = decode_from_engine(frames[0])
            received.append(message)
            self._answer(message)
        return received

    def _answer(self, message: FromEngine) -> None:
        reply: Message | None = None
        if isinstance(message, Hello):
            reply = Welcome(
                heartbeat_interval_s=0.5, orchestrator_timeout_s=TIMEOUT_S, credit_steps=64
            )
        elif isinstance(message, Step):
            self.steps += 1
            reply = Ack(seq=message.seq)
            self._state.seq = message.seq + 1
        if reply is not None:
            self._send(encode(reply))

    # ------------------------------------------------------------ the engine

    def _start(self) -> None:
        self.starts += 1
        self._sent = 0
        self._name = f"engine-{self.starts}".encode()
        hello = LiveState(engine=self._name.decode(), vocab_size=LIMITS.vocab_size)
        self._socket = DealerSocket(self._address, self._name)
        self._staging = Staging(lambda: _random_weights())
        runner = ModelRunner(_CONFIG, _random_weights(), num_blocks=64, block_tokens=16)
        scheduler = EngineScheduler(LIMITS)
        self._loop = EngineLoop(
            OrchestratorLink(self._socket, hello_of(hello)),
            runner=runner,
            scheduler=scheduler,
            staging=self._staging,
            sleep_controller=SleepController(
                runner, self._staging, scheduler, reload=lambda weights, heartbeat: None
            ),
        )
        self._thread = threading.Thread(target=self._live, name=self._name.decode())
        self._thread.start()
        deadline_s = time.monotonic() + TIMEOUT_S
        while not any(isinstance(message, Hello) for message in self._receive()):
            if time.monotonic() > deadline_s:
                raise AssertionError("the engine does not say hello")
            self._router.poll(10)

    def _live(self) -> None:
        try:
            self._loop.run()
        except TidegateError:
            pass  # it exits by design
        except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
            self.failures.append(traceback.format_exc())

    def _end(self) -> None:
        self._send(encode(Shutdown()))
        self._thread.join(TIMEOUT_S)
        if self._thread.is_alive():
            raise AssertionError("the engine doesn't end at a Shutdown")
        thread = self._staging._thread
        if thread is None or not thread.is_alive():
            self.failures.append("the thread that stages weights has died")
        self._staging.close()
        self.malformed += self._socket.statistics().malformed
        self._socket.close()

    def _restart(self) -> None:
        self._end()
        self._start()


def _random_weights() -> Weights:
    weights = Weights.allocate(_CONFIG, torch.float32)
    layer = weights.layers[0]
    for matrix in (weights.embedding, layer.qkv, layer.output, *layer.gate_up, *layer.down):
        matrix.storage.normal_(std=0.3)
    for norm in (layer.input_norm, layer.mlp_norm, weights.final_norm):
        norm.fill_(1.0)
    return weights
