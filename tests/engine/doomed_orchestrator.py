"""Orchestrator process that a test kills: welcomes an engine, submits a turn and half of a version.

It acknowledges nothing, prints ``ready`` once tokens have arrived, and reads on until killed.
"""

import sys
from pathlib import Path

import numpy as np
import zmq

from tests.engine.orchestra import PROMPT, named_buffers
from tidegate.transport.messages import (
    SamplingParams,
    StartWeightUpdate,
    Step,
    SubmitTurn,
    UpdateWeights,
    Welcome,
    decode_from_engine,
    encode,
)
from tidegate.transport.weight_channels import sender

CREDIT_STEPS = 12

SAMPLING = SamplingParams(max_tokens=40, seed=11)
"""Sampling of turn 0, which ends later than the credit does."""


def main(address: str, model: Path) -> None:
    """Serve the engine that connects, until killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(address)
    peer, _ = socket.recv_multipart()  # its hello
    channel = sender("shm", None)
    (whole,) = channel.write(1, named_buffers(model))
    half = UpdateWeights(
        version=1, location=whole.location, tensors=whole.tensors[:-1], is_last=False
    )
    for message in (
        Welcome(heartbeat_interval_s=0.2, orchestrator_timeout_s=600, credit_steps=CREDIT_STEPS),
        channel.init(),
        StartWeightUpdate(version=1),
        half,
        SubmitTurn(turn=0, token_ids=np.array(PROMPT, "<i4").tobytes(), sampling=SAMPLING),
    ):
        socket.send_multipart([peer, encode(message)])
    steps = 0
    while True:
        steps += isinstance(decode_from_engine(socket.recv_multipart()[1]), Step)
        if steps == 3:
            sys.stdout.write("ready\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
