"""Sending process with a plain ZeroMQ DEALER, with or without CURVE keys, for :mod:`messages`.

``python -m benchmarks.transport.dealer ADDRESS COUNT BYTES [KEYS]``: the message benchmark starts
it. Built on pyzmq.
"""

import sys
from pathlib import Path

import zmq

from tidegate.transport.security import read_engine_keys, secure_connector


def main() -> None:
    """Send all messages, and exit once they are sent."""
    address, count, size, *keys = sys.argv[1:]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, b"engine")
        # bounded for large messages, so that their memory is reused
        socket.sndhwm = 64 if int(size) > 4096 else 0
        if keys:
            secure_connector(socket, read_engine_keys(Path(keys[0])))
        socket.connect(address)
        payload = bytes(int(size))
        for _ in range(int(count)):
            socket.send(payload)


if __name__ == "__main__":
    main()
