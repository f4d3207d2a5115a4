"""Fuzz target: a whole run over its real socket, with one healthy engine and a flooding process.

The flood never joins the run and never reads; it reconnects under ever new names. As a program
(``python -m tests.fuzz.fuzzed_run ADDRESS FRAMES SEED``) this module is that flood.
"""

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import zmq
from tokenizers import Tokenizer, models

from tests.fuzz.frames import ENGINE_EXAMPLES, FrameMaker, LiveState, hello_of, step_of
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.settings.config import run_settings
from tidegate.orchestrator.trainer.run import Run
from tidegate.runs import run_parts
from tidegate.transport.dealer import DealerSocket
from tidegate.transport.messages import (
    EngineHeartbeat,
    Message,
    Shutdown,
    Step,
    SubmitTurn,
)

TIMEOUT_S = 120.0

FRAMES_PER_NAME = 500
"""Frames per connection; then the flood reconnects under another name."""

FRAMES_AHEAD_MAX = 10 * FRAMES_PER_NAME
"""Maximum number of unread frames; sockets limit the queue per connection, not the number of
connections."""

TASKS_AT_ONCE = 8

VOCAB_SIZE = 1000


class FuzzedRun:
    """A run that is evaluated over and over while it is flooded; a context manager."""

    def __init__(self, directory: Path) -> None:
        address = f"ipc://{directory}/run"
        settings = run_settings(
            model=_model_directory(directory / "model"), engines=0, listen_address=address
        )
        self.episodes = 0
        self._run = Run(settings, run_parts(settings))
        self._address = address
        self._engine = _HealthyEngine(address)
        self._flood: subprocess.Popen[bytes] | None = None
        self._let_through = 0

    def __enter__(self) -> "FuzzedRun":
        self._run.start()
        self._engine.start()
        self._run.ready.result(TIMEOUT_S)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._flood is not None and self._flood.poll() is None:
            self._flood.kill()
        if self._flood is not None:
            self._flood.communicate()
        self._run.stop()
        self._engine.join(TIMEOUT_S)

    def flood(self, frames: int, seed: int) -> None:
        arguments = [self._address, str(frames), str(seed)]
        self._flood = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.fuzzed_run", *arguments],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
        )

    def evaluate(self) -> None:
        """Have the healthy engine serve some turns; all must complete."""
        work = self._run.submit(lambda run: run.evaluate(list(range(TASKS_AT_ONCE)), _episode))
        rollouts = work.result(TIMEOUT_S)
        self.episodes += sum(rollout.reward == 1.0 for rollout in rollouts)

    @property
    def frames(self) -> int:
        """Lower bound of the flood's frames that the run has read."""
        healthy = self._engine.sent
        assert self._run.scheduler is not None
        statistics = self._run.scheduler._router.statistics()  # type: ignore[attr-defined]
        return int(statistics.frames + statistics.malformed) - healthy

    @property
    def malformed(self) -> int:
        assert self._run.scheduler is not None
        many_frames = self._run.scheduler._router.statistics().malformed  # type: ignore[attr-defined]
        return int(many_frames) + self._run.scheduler.fleet.malformed_frames

    def await_frames(self, count: int) -> None:
        assert self._flood is not None
        assert self._flood.stdin is not None
        read, deadline_s = -1, 0.0
        while self.frames < count:
            if self.frames > read:
                read, deadline_s = self.frames, time.monotonic() + TIMEOUT_S
            if time.monotonic() > deadline_s:
                raise AssertionError(f"the run has read {read} of {count} frames")
            if self._let_through < count and read >= self._let_through - FRAMES_AHEAD_MAX // 2:
                self._let_through += FRAMES_AHEAD_MAX // 2
                self._flood.stdin.write(b".")
                self._flood.stdin.flush()
            self.evaluate()


async def _episode(episode: Episode, task: object) -> float:
    episode.append([1, 2, 3])
    turn = await episode.generate(max_tokens=4)
    return float(list(turn.token_ids) == [5])


class _HealthyEngine(threading.Thread):
    def __init__(self, address: str) -> None:
        super().__init__(name="healthy engine")
        self.sent = 0
        """Number of frames sent."""
        self._socket = DealerSocket(address, b"healthy")
        self._state = LiveState(engine="healthy", vocab_size=VOCAB_SIZE)

    def run(self) -> None:
        self._send(hello_of(self._state))
        heartbeat_due_s = 0.0
        while True:
            for message in self._socket.receive(0.1):
                if isinstance(message, SubmitTurn):
                    self._state.turns = [message.turn]
                    self._send_step(step_of(self._state, finish=b"\1"))
                elif isinstance(message, Shutdown):
                    self._socket.close()
                    return
            if time.monotonic() > heartbeat_due_s:
                heartbeat_due_s = time.monotonic() + 0.5
                self._send(
                    EngineHeartbeat(
                        weight_version=0, running_turns=0, waiting_turns=0, free_blocks=1, sent_us=1
                    )
                )

    def _send_step(self, step: Step) -> None:
        self._send(step)
        self._state.seq += 1

    def _send(self, message: Message) -> None:
        self.sent += 1
        self._socket.send(message)


def _model_directory(path: Path) -> Path:
    """Write the files of a model directory that an orchestrator reads."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    words = {f"w{number}": number for number in range(VOCAB_SIZE)}
    Tokenizer(models.BPE(vocab=words, merges=[])).save(str(path / "tokenizer.json"))
    return path


# ---------------------------------------------------------------- the flood


def flood(address: str, frames: int, seed: int) -> None:
    chance = random.Random(seed)
    maker = FrameMaker(seed, ENGINE_EXAMPLES)
    # the name in hello never matches the sender's, so none can join
    state = LiveState(turns=[1, 2, 3])
    with zmq.Context() as context:
        for begin in range(0, frames, FRAMES_PER_NAME):
            if begin % (FRAMES_AHEAD_MAX // 2) == 0:
                sys.stdin.buffer.read(1)  # blocks until the run has caught up
            socket = context.socket(zmq.DEALER)
            name = b"bad-%d" % begin
            # Names are used once: a reconnect under a name would replace the earlier, unread
            # connection.
            socket.identity = chance.choice((b"\xff" + name, name))
            socket.connect(address)
            for _ in range(min(FRAMES_PER_NAME, frames - begin)):
                parts = [maker.frame(state)]
                while chance.random() < 0.02:
                    parts.append(b"" if chance.random() < 0.5 else parts[0])
                socket.send_multipart(parts)
            socket.close()  # the context waits until all is sent


if __name__ == "__main__":
    flood(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
