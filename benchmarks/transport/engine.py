"""Sending process that streams an engine's step messages over ZeroMQ.

``python -m benchmarks.transport.engine ADDRESS --tokens T …`` is the other end of
:mod:`benchmarks.transport.tokens`.
"""

import argparse
import time
from array import array

from msgspec.structs import replace

from tidegate.simulation.engine.spec import SimulatedEngineSpec, hello_of
from tidegate.transport.dealer import DealerSocket
from tidegate.transport.messages import LENGTH, Ack, Step, Welcome, encode
from tidegate.transport.streams import SendWindow

NAME = "engine"
VOCAB_SIZE = 32_768
TOKENS_PER_VERSION = 512
IDLE_S = 0.1


def frames(work: argparse.Namespace) -> list[bytes]:
    """Encode all step messages; in each wave, the same turns from their first token to their last.

    They are encoded in advance, so that the receiver is the bottleneck.
    """
    rows, tokens = work.turns, work.tokens
    turns = array("I", range(rows)).tobytes()
    token_ids = array("i", (7 * n % VOCAB_SIZE for n in range(rows * tokens))).tobytes()
    logprobs = array("f", (-0.1 * (n % 50) for n in range(rows * tokens))).tobytes()
    counts = array("I", [tokens] * rows).tobytes() if tokens > 1 else b""
    steps = (
        Step(
            seq=seq,
            version=seq * tokens // TOKENS_PER_VERSION,
            turns=turns,
            token_ids=token_ids,
            logprobs=logprobs,
            counts=counts,
            finish=bytes([LENGTH]) * rows if (seq + 1) % work.steps == 0 else b"",
            started_us=1000 * seq,
            busy_us=1000,
        )
        for seq in range(work.waves * work.steps)
    )
    return [encode(step) for step in steps]


def send(work: argparse.Namespace) -> None:
    """Send over the real socket, with credits and acknowledgements, as an engine does."""
    steps = frames(work)
    dealer = DealerSocket(work.address, NAME.encode())
    hello = hello_of(NAME, 1, SimulatedEngineSpec())
    dealer.send(replace(hello, vocab_size=VOCAB_SIZE, max_running_turns=1 << 20))
    window: SendWindow | None = None
    while window is None:
        for message in dealer.receive(IDLE_S):
            if isinstance(message, Welcome):
                window = SendWindow(message.credit_steps)
    started_s = time.perf_counter()
    for seq, frame in enumerate(steps):
        if work.steps_per_s:
            time.sleep(max(0.0, started_s + seq / work.steps_per_s - time.perf_counter()))
        while not window.is_open or seq % 32 == 0:
            for message in dealer.receive(0.0 if window.is_open else IDLE_S):
                if isinstance(message, Ack):
                    window.acknowledge(message.seq)
            if window.is_open:
                break
        window.sent(seq, frame)
        dealer.send_again(frame)
    dealer.close()


def main() -> None:
    """Serve one receiver."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--turns", type=int, required=True, help="rows per step")
    parser.add_argument("--tokens", type=int, required=True, help="per row and step")
    parser.add_argument("--steps", type=int, required=True, help="per wave of turns")
    parser.add_argument("--waves", type=int, required=True)
    parser.add_argument("--steps-per-s", type=float, default=0.0, help="0: as fast as they go")
    send(parser.parse_args())


if __name__ == "__main__":
    main()
