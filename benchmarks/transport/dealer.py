"""What does a sender with ZeroMQ's own socket do, with keys or without? It sends, and says no more.

``python -m benchmarks.transport.dealer ADDRESS COUNT BYTES [KEYS]``
"""

import sys
from pathlib import Path

import zmq

from tidegate.transport.security import read_engine_keys, secure_connector


def main() -> None:
    """Send, and end once all is on its way."""
    address, count, size, *keys = sys.argv[1:]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, b"engine")
        socket.sndhwm = 64 if int(size) > 4096 else 0  # bytes wait in memory that is used again
        if keys:
            secure_connector(socket, read_engine_keys(Path(keys[0])))
        socket.connect(address)
        payload = bytes(int(size))
        for _ in range(int(count)):
            socket.send(payload)


if __name__ == "__main__":
    main()
