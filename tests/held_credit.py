"""How does a test keep a turn from ending before what is to happen meanwhile? It holds credit back.

An engine that hears of no acknowledgement stops when its credit is used up, ``credit_steps`` after
the last one. So a turn of more steps than that is still going on when engines are told what the
test waits for, however fast they are and however late that is; then they get their credit back.
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
    """Whether it has an engine pause, in any mode."""
    return isinstance(message, Pause)


@contextmanager
def turns_go_on_until(
    run: tidegate.Rollouts | tidegate.VLLMServer, is_told: Callable[[Message], bool]
) -> Iterator[None]:
    """Give no engine credit back before it was told such a message; afterwards all of it."""
    scheduler = running(run).scheduler
    assert scheduler is not None
    fleet, send = scheduler.fleet, scheduler.fleet._send
    held: dict[bytes, Ack] = {}
    told: set[bytes] = set()

    def hold(peer: bytes, message: Message) -> bool:
        if isinstance(message, Ack) and peer not in told:
            held[peer] = message  # it confirms all that those before it do
            return True
        is_there = send(peer, message)
        if is_told(message):
            told.add(peer)
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
