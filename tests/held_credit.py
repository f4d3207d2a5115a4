"""Holds back an engine's credit, so that a turn cannot end before a certain message is sent.

An engine that gets no acknowledgement stops after ``credit_steps`` steps. So a turn of more steps
is still running when the engines get the message that the test waits for, however fast they are and
however late it is; then they get their credit back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tidegate
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.trainer.run import Run
from tidegate.transport.messages import Ack, Message, Pause

WAIT_S = 60.0


def running(run: tidegate.Rollouts | tidegate.VLLMServer) -> Run:
    return (run._handle if isinstance(run, tidegate.VLLMServer) else run)._running


def paused(message: Message) -> bool:
    """Return whether the message is a pause, in any mode."""
    return isinstance(message, Pause)


@contextmanager
def turns_continue_until(
    run: tidegate.Rollouts | tidegate.VLLMServer, is_awaited_message: Callable[[Message], bool]
) -> Iterator[None]:
    """Hold back each engine's acknowledgements until it was sent such a message."""
    scheduler = running(run).scheduler
    assert scheduler is not None
    fleet, send = scheduler.fleet, scheduler.fleet._send
    held: dict[bytes, Ack] = {}
    reported: set[bytes] = set()

    def hold(peer: bytes, message: Message) -> bool:
        if isinstance(message, Ack) and peer not in reported:
            held[peer] = message  # it acknowledges all that earlier ones do
            return True
        is_there = send(peer, message)
        if is_awaited_message(message):
            reported.add(peer)
            if peer in held:
                send(peer, held.pop(peer))
        return is_there

    async def let_go(_: Scheduler) -> None:
        fleet._send = send
        for peer, ack in held.items():
            send(peer, ack)

    fleet._send = hold
    try:
        yield
    finally:
        running(run).submit(let_go).result(WAIT_S)
