"""Which engines of this host want what, and how much of it were they told there is?

It knows local connections; not where weights come from.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tidegate.errors import BadFrame
from tidegate.transport.weight_channels.host_memory import MESSAGE_BYTES_MAX, is_own_user
from tidegate.transport.weight_channels.relay import Ready, decode_want, encode
from tidegate.transport.weight_channels.relay_slot import Slot


@dataclass(eq=False, slots=True)
class Client:
    """An engine of this host."""

    link: socket.socket
    location: str = ""
    """What it wants."""
    told_bytes: int = -1
    """What it was told there is; -1: it hasn't got the memory yet."""


class Clients:
    """The engines connected to this host's relay."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
        slot: Callable[[str], Slot | None],
    ) -> None:
        """``slot`` is asked for what an engine wants; None is too much to ask."""
        self._listener = listener
        self._watch = watch
        self._unwatch = unwatch
        self._slot = slot
        self._all: dict[int, Client] = {}
        """By file descriptor."""
        watch(listener.fileno(), self._admit)

    def tell(self, slot: Slot, *, again: bool = False) -> None:
        """Say how much there is to those who want it; ``again``: even if it is no more."""
        for client in list(self._all.values()):
            if client.location == slot.location:
                self._tell(client, slot, again=again)

    def refuse(self, location: str, why: str) -> None:
        """Say that it won't come."""
        for client in list(self._all.values()):
            if client.location == location:
                client.location = ""
                self._send(client, Ready(location, refusal=why))

    def close(self) -> None:
        """The name first: so it is free for the first who hears that this relay is gone."""
        self._listener.close()
        for client in self._all.values():
            client.link.close()

    def _admit(self) -> None:
        with suppress(BlockingIOError):
            link, _ = self._listener.accept()
            if not is_own_user(link):
                link.close()
                return
            link.setblocking(False)
            client = self._all[link.fileno()] = Client(link)
            self._watch(link.fileno(), lambda: self._hear(client))

    def _hear(self, client: Client) -> None:
        try:
            frame = client.link.recv(MESSAGE_BYTES_MAX)
            want = decode_want(frame) if frame else None
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            want = None
        if want is None:
            self._drop(client)
            return
        client.location, client.told_bytes = want.location, -1
        slot = self._slot(want.location)
        if slot is None:
            self._send(client, Ready(want.location, refusal="too many versions at once"))
        else:
            self._tell(client, slot)

    def _tell(self, client: Client, slot: Slot, *, again: bool = False) -> None:
        if slot.memory is None:
            if again:
                self._send(client, Ready(""))  # of no location: a sign of life
            return
        there = slot.complete_bytes
        if client.told_bytes == there and (slot.is_complete or not again):
            return
        fds = [slot.memory.fd] if client.told_bytes < 0 else []
        if self._send(client, Ready(slot.location, there), fds):
            client.told_bytes = there

    def _send(self, client: Client, ready: Ready, fds: list[int] | None = None) -> bool:
        try:
            socket.send_fds(client.link, [encode(ready)], fds or [])
        except BlockingIOError:
            return False  # it has a lot to read yet; it is told at the next tick
        except OSError:
            self._drop(client)
            return False
        return True

    def _drop(self, client: Client) -> None:
        fileno = client.link.fileno()
        if self._all.pop(fileno, None) is not None:
            self._unwatch(fileno)
            client.link.close()
