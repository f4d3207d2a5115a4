"""What must a worker in another language do? A whole one, with only zmq and msgpack.

It joins, serves turns by counting upwards from the last token of the prompt, keeps what is not
acknowledged, and leaves when told to. Read it beside docs/protocol.md.
"""

import math
import os
import struct
import sys
import time
from collections import deque
from typing import Any

import msgpack
import zmq

STOP, LENGTH = 1, 2


class Worker:
    """One engine, as small as the protocol allows."""

    def __init__(self, address: str, name: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.identity = name.encode()
        self.socket.connect(address)
        self.name = name
        self.seq = 0
        self.credit_steps = 1
        self.unacknowledged: deque[tuple[int, bytes]] = deque()
        self.turns: dict[int, list[int]] = {}  # handle -> [last token, tokens still to sample]
        self.is_over = False

    def send(self, kind: str, **fields: Any) -> bytes:
        frame: bytes = msgpack.packb({"kind": kind, **fields})
        self.socket.send(frame)
        return frame

    def hello(self) -> None:
        self.send(
            "hello",
            protocol=1,
            engine=self.name,
            epoch=time.time_ns(),
            weight_version=0,
            architecture="Counter",
            vocab_size=1000,
            context_tokens_max=4096,
            max_running_turns=8,
            num_blocks=1,
            block_tokens=4096,
            pause_modes=["abort"],
            kv_policies=["recompute"],
            weight_channels=[],
            pid=os.getpid(),
        )

    def handle(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "welcome":
                self.credit_steps = message["credit_steps"]
            case "submit_turn":
                ids = message["token_ids"]
                prompt = struct.unpack(f"<{len(ids) // 4}i", ids)
                self.turns[message["turn"]] = [prompt[-1], message["sampling"]["max_tokens"]]
            case "cancel_turn":
                self.turns.pop(message["turn"], None)
            case "ack":
                while self.unacknowledged and self.unacknowledged[0][0] <= message["seq"]:
                    self.unacknowledged.popleft()
            case "shutdown":
                self.is_over = True

    def step(self) -> None:
        """One token for each turn, in one message."""
        handles = list(self.turns)
        finish = []
        for turn in handles:
            self.turns[turn][0] += 1
            self.turns[turn][1] -= 1
            finish.append(LENGTH if self.turns[turn][1] == 0 else 0)
        rows = len(handles)
        frame = self.send(
            "step",
            seq=self.seq,
            version=0,
            turns=struct.pack(f"<{rows}I", *handles),
            token_ids=struct.pack(f"<{rows}i", *(self.turns[turn][0] for turn in handles)),
            logprobs=struct.pack(f"<{rows}f", *[math.log(0.5)] * rows),
            finish=bytes(finish) if any(finish) else b"",
        )
        self.unacknowledged.append((self.seq, frame))
        self.seq += 1
        self.turns = {turn: state for turn, state in self.turns.items() if state[1] > 0}

    def run(self) -> None:
        self.hello()
        while not self.is_over:
            can_step = self.turns and len(self.unacknowledged) < self.credit_steps
            if self.socket.poll(0 if can_step else 100):
                self.handle(msgpack.unpackb(self.socket.recv()))
            elif can_step:
                self.step()
        self.send("goodbye", reason=f"{len(self.unacknowledged)} steps unacknowledged")
        self.socket.close()
        self.context.term()  # returns when the goodbye is out


if __name__ == "__main__":
    Worker(sys.argv[1], sys.argv[2]).run()
