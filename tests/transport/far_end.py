"""Echo process: ``python -m tests.transport.far_end ADDRESS``; prints a line per connection change.

It sends back whatever it receives, and sends a message each time that it is connected.
"""

import sys

import zmq
from zmq.utils.monitor import recv_monitor_message

from tidegate.transport.zeromq import new_socket


def main(address: str) -> None:
    """Echo until killed."""
    talk = new_socket(zmq.DEALER, address)
    monitor = talk.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    talk.connect(address)
    poller = zmq.Poller()
    poller.register(talk, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if monitor in ready:
            is_there = recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            sys.stdout.write("connected\n" if is_there else "broken\n")
            sys.stdout.flush()
            if is_there:
                talk.send(b"here")
        if talk in ready:
            talk.send(talk.recv())


if __name__ == "__main__":
    main(sys.argv[1])
