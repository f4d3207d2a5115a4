"""How do processes of environments run on a Ray cluster? An actor for each, and a tunnel to it.

Ray places them and tells of lost nodes. Calls and replies go through a tunnel of ZeroMQ, with keys
that came as the actor's argument. It knows processes, not environments.
"""

import asyncio
import itertools
import socket
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import IO, Any

from tidegate.environments.started_worker import LocalWorker, StartedWorker, Workers, WorkersFactory
from tidegate.integrations.ray.ray_places import (
    RayPlaces,
    RayRoom,
    connected_ray,
    own_address,
    said,
)
from tidegate.transport.security import EngineKeys, passing_keys
from tidegate.transport.tunnel_exit import TunnelExit
from tidegate.transport.tunnels import Tunnel, TunnelEntrance

CLOSE_TIMEOUT_S = 2.0
"""For actors to kill what their processes have started; then they are killed themselves."""


class RayEnvironmentWorker:
    """The actor: it has one process, and carries for it."""

    def __init__(self, address: str, name: str, keys: EngineKeys) -> None:
        """Where the tunnel begins."""
        self._address, self._name, self._keys = address, name, keys

    def serve(
        self, python: str, memory_bytes: int | None, pass_variables: tuple[str, ...] = ()
    ) -> None:
        """Have a process here until it ends, or is to. It dies with this thread."""
        worker = LocalWorker(python, memory_bytes, pass_variables)
        tunnel = TunnelExit(self._address, self._name, self._keys)
        with worker.connection, worker.output:
            tunnel.carry(worker.connection, worker.output, worker.kill)


def ray_workers(places: RayPlaces) -> WorkersFactory:
    """Return the ``workers=`` argument of an ``EnvironmentPool`` whose processes run on Ray.

    Args:
        places: the resources of each process, and the placement group it goes into.
    """

    def start_on_ray(
        python: str, memory_bytes: int | None, pass_variables: tuple[str, ...]
    ) -> Workers:
        return RayWorkers(python, memory_bytes, pass_variables, places)

    return start_on_ray


class RayWorkers:
    """Starts them, each where Ray finds a place."""

    def __init__(
        self,
        python: str,
        memory_bytes: int | None,
        pass_variables: tuple[str, ...],
        places: RayPlaces,
    ) -> None:
        """Connect to Ray.

        Raises:
            ConfigError: there is no Ray, or nothing of what is asked for.
        """
        self._ray = connected_ray()
        self._room = RayRoom(self._ray, places)
        self._told = python, memory_bytes, pass_variables
        keys, self._worker_keys = passing_keys()
        self._entrance = TunnelEntrance(own_address(self._ray), keys)
        self._numbers = itertools.count()
        self._free: list[int] = []
        """Numbers of processes that have ended: bundles that have room again."""
        self._served: dict[Future[None], Any] = {}

    def start(self) -> StartedWorker:
        """It is ready once Ray has a place for it."""
        number = self._free.pop() if self._free else next(self._numbers)
        name = f"environments-{number}-{uuid.uuid4().hex[:8]}"
        tunnel = self._entrance.open(name)
        made = self._ray.remote(RayEnvironmentWorker).options(
            max_restarts=0, **self._room.options(number)
        )
        actor = made.remote(self._entrance.address, name, self._worker_keys)
        served: Future[None] = actor.serve.remote(*self._told).future()
        self._served[served] = actor

        loop = asyncio.get_running_loop()

        def ended(future: "Future[None]") -> None:
            with suppress(RuntimeError):  # the loop has closed: close() looks after the rest
                # Not here: this is Ray's own thread, which would wait for itself.
                loop.call_soon_threadsafe(self._ended, number, tunnel, future)

        served.add_done_callback(ended)
        return RayWorker(tunnel, self._entrance, partial(self._killed, number))

    def _killed(self, number: int) -> None:
        """Its bundle is the next one's, who waits there until Ray has heard of this end, too."""
        if self._room.is_shared:
            self._free.append(number)

    def _ended(self, number: int, tunnel: Tunnel, served: "Future[None]") -> None:
        error = served.exception()
        if isinstance(error, self._ray.exceptions.RayActorError):
            self._entrance.lose(tunnel, f"its actor or node was lost: {said(error)}")
        elif error is not None:
            self._entrance.kill(tunnel, f"its actor failed: {said(error)}")
        else:
            self._entrance.kill(tunnel, "its actor is gone")
        self._served.pop(served, None)
        if not self._room.is_shared:
            self._room.give_back(number)
            self._free.append(number)

    def close(self) -> None:
        """Have all end, kill what doesn't, and give the places back."""
        self._entrance.close()
        left = dict(self._served)
        for future in wait(left, CLOSE_TIMEOUT_S).not_done:
            self._ray.kill(left[future])
        self._room.give_all_back()


class RayWorker:
    """One process on some node."""

    start_timeout_s = 600.0
    """Ray may have to wait for a node first."""

    def __init__(
        self, tunnel: Tunnel, entrance: TunnelEntrance, on_kill: Callable[[], None]
    ) -> None:
        self._tunnel = tunnel
        self._entrance = entrance
        self._on_kill = on_kill
        self.name = f"process on Ray's nodes ({tunnel.name})"
        self.connection: socket.socket = tunnel.connection
        self.output: IO[bytes] = tunnel.output

    @property
    def was_lost(self) -> bool:
        """Whether its actor or node was, or a piece on the way."""
        return self._tunnel.was_lost

    def kill(self) -> str:
        """Its actor ends it, and all that it has started."""
        with suppress(OSError):
            self._entrance.kill(self._tunnel)
        self._on_kill()
        return self._tunnel.how_it_ended or "killed"
