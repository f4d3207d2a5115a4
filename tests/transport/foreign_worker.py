"""Minimal engine worker that uses only zmq and msgpack, as in another language.

It joins, serves turns by counting upwards from the prompt's last token, keeps unacknowledged steps,
resumes after a lost connection, and leaves when asked to. Read it beside docs/protocol.md.
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
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(address)
        self.name = name
        self.epoch = time.time_ns()
        self.is_welcome = False
        self.seq = 0
        self.credit_steps = 1
        self.unacknowledged: deque[tuple[int, bytes]] = deque()
        self.turns: dict[int, list[int]] = {}  # handle -> [last token, tokens still to sample]
        self.is_over = False

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.send(msgpack.packb({"kind": kind, **fields}))

    def hello(self) -> None:
        """Send the hello, first on each connection and after each message_rejected."""
        self.is_welcome = False
        self.send(
            "hello",
            protocol=3,
            engine=self.name,
            epoch=self.epoch,
            weight_version=0,
            architecture="Counter",
            vocab_size=1000,
            context_tokens_max=4096,
            max_running_turns=8,
            num_kv_blocks=1,
            block_tokens=4096,
            pause_modes=["abort"],
            kv_policies=["recompute"],
            weight_channels=[],
            pid=os.getpid(),
            first_seq=self.unacknowledged[0][0] if self.unacknowledged else self.seq,
            next_seq=self.seq,
            turns=struct.pack(f"<{len(self.turns)}I", *self.turns),
        )

    def handle(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "welcome" if not self.is_welcome:
                self.is_welcome = True
                self.credit_steps = message["credit_steps"]
                for _, frame in self.unacknowledged:
                    self.socket.send(frame)
            case "shutdown" | "hello_rejected":
                self.is_over = True
            case _ if not self.is_welcome:
                pass  # sent before the orchestrator had received the hello
            case "submit_turn":
                ids = message["token_ids"]
                prompt = struct.unpack(f"<{len(ids) // 4}i", ids)
                self.turns[message["turn"]] = [prompt[-1], message["sampling"]["max_tokens"]]
            case "cancel_turn":
                self.turns.pop(message["turn"], None)
            case "ack":
                while self.unacknowledged and self.unacknowledged[0][0] <= message["seq"]:
                    self.unacknowledged.popleft()
            case "message_rejected":
                self.hello()

    def step(self) -> None:
        """Send one token for each turn, in one message."""
        handles = list(self.turns)
        finish = []
        for turn in handles:
            self.turns[turn][0] += 1
            self.turns[turn][1] -= 1
            finish.append(LENGTH if self.turns[turn][1] == 0 else 0)
        rows = len(handles)
        step = {
            "kind": "step",
            "seq": self.seq,
            "version": 0,
            "turns": struct.pack(f"<{rows}I", *handles),
            "token_ids": struct.pack(f"<{rows}i", *(self.turns[turn][0] for turn in handles)),
            "logprobs": struct.pack(f"<{rows}f", *[math.log(0.5)] * rows),
            "finish": bytes(finish) if any(finish) else b"",
        }
        self.unacknowledged.append((self.seq, msgpack.packb(step)))
        self.seq += 1
        self.turns = {turn: state for turn, state in self.turns.items() if state[1] > 0}
        if self.is_welcome:
            self.socket.send(self.unacknowledged[-1][1])

    def run(self) -> None:
        while not self.is_over:
            can_step = self.turns and len(self.unacknowledged) < self.credit_steps
            if self.monitor.poll(0):
                self.monitor.recv_multipart()
                while self.socket.poll(0):
                    self.socket.recv()  # messages from before this connection
                self.hello()
            elif self.socket.poll(0 if can_step else 20):
                self.handle(msgpack.unpackb(self.socket.recv()))
            elif can_step:
                self.step()
        self.send("goodbye", reason=f"{len(self.unacknowledged)} steps unacknowledged")
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
        self.context.term()  # returns when the goodbye is out


if __name__ == "__main__":
    Worker(sys.argv[1], sys.argv[2]).run()
