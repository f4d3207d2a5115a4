"""Interfaces of a run's shell: what drains, weight control and adapters call, and its wire.

These callers are in rooms below the scheduler's, so they cannot import the scheduler.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.transport.messages import AdapterLive, Message, WeightsLive


class RunShell(Protocol):
    """Methods of :class:`Scheduler`."""

    @property
    def core(self) -> Core:
        """The run's core."""

    def handle(self, event: ev.Event) -> None:
        """Feed an event to the core, and carry out its commands."""

    def when_safe(self, action: Callable[[], None]) -> None:
        """Call ``action`` once no crash can undo the events handled so far."""

    def hold_batches(self, is_held: bool, adapter: str = "") -> None:
        """Stop handing batches over while it is undecided which version the trainer of the run's
        weights, or of an adapter, has published; False: hand them over again."""

    def suspend_deadlines(self, is_halted: bool) -> None:
        """Stop the clocks of all episodes while engines are paused, or start them again."""

    def fail(self, error: BaseException) -> None:
        """End the run with this error."""


class EngineShell(Protocol):
    """Methods of :class:`EngineSide`."""

    def send(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        """Send messages to engines, after all messages posted before."""

    def give_up_engine(self, engine: str, why: str) -> None:
        """Remove an engine that does not answer."""

    def refuse_engine(self, engine: str, why: str) -> None:
        """Remove an engine that refused weights that other engines serve, and send it the
        reason."""

    def exclude(self, engine: str) -> None:
        """Leave a draining engine out of weight updates, pauses, sleep, adapters and scoring."""

    @property
    def is_pausing(self) -> bool:
        """Whether engines are paused, or about to be."""

    def staged(self, engine: str, version: int) -> None:
        """Record that an engine holds new weights beside its live ones."""

    def swapped(self, engine: str, message: WeightsLive) -> None:
        """Handle that an engine serves another version of the run's weights from now on."""

    def adapter_live(self, engine: str, message: AdapterLive) -> None:
        """Handle that an engine serves another version of an adapter from now on."""


class Wire(Protocol):
    """The orchestrator's end of the wire, connected with any number of engines: the ZeroMQ ROUTER,
    or the simulated wire."""

    address: str

    def send(self, peer: bytes, message: Message) -> bool:
        """Queue one message without waiting; False if the peer isn't connected any more."""

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frames: Callable[[list[tuple[bytes, bytes]]], None],
    ) -> None:
        """Have ``loop`` call ``on_frames`` with the (peer, frame) pairs that have arrived."""

    def detach(self) -> None:
        """Stop calling back."""

    def close(self) -> None:
        """Release the address."""
