"""Worker processes of an environment pool on a Ray cluster: one actor each, connected by a tunnel.

Users pass ``tidegate.ray_workers`` as the pool's ``workers``. Ray places the actors and reports
lost nodes. Calls and replies go through a ZeroMQ tunnel, with keys from the actor's arguments.
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
from tidegate.integrations.ray.ray_resources import (
    RayPlacement,
    RayResources,
    connected_ray,
    error_line,
    node_address,
)
from tidegate.transport.security import EngineKeys, ephemeral_keys
from tidegate.transport.tunnel_exit import TunnelExit
from tidegate.transport.tunnels import Tunnel, TunnelEntrance

CLOSE_TIMEOUT_S = 2.0
"""Longest time in seconds for actors to kill their processes; then Ray kills the actors."""


class RayEnvironmentWorker:
    """Ray actor that starts one worker process, and forwards its socket and output."""

    def __init__(self, address: str, name: str, keys: EngineKeys) -> None:
        """Take the address, name and keys of the tunnel."""
        self._address, self._name, self._keys = address, name, keys

    def serve(
        self, python: str, memory_bytes: int | None, pass_variables: tuple[str, ...] = ()
    ) -> None:
        """Run a worker process until it ends or is to be killed. It dies with this thread."""
        worker = LocalWorker(python, memory_bytes, pass_variables)
        tunnel = TunnelExit(self._address, self._name, self._keys)
        with worker.connection, worker.output:
            tunnel.carry(worker.connection, worker.output, worker.kill)


def ray_workers(resources: RayResources) -> WorkersFactory:
    """Return the ``workers=`` argument of an ``EnvironmentPool`` whose processes run on Ray.

    Args:
        resources: resources and placement group of each process.
    """

    def start_on_ray(
        python: str, memory_bytes: int | None, pass_variables: tuple[str, ...]
    ) -> Workers:
        return RayWorkers(python, memory_bytes, pass_variables, resources)

    return start_on_ray


class RayWorkers:
    """Starts worker processes as Ray actors; implements :class:`Workers`."""

    def __init__(
        self,
        python: str,
        memory_bytes: int | None,
        pass_variables: tuple[str, ...],
        resources: RayResources,
    ) -> None:
        """Connect to Ray.

        Raises:
            ConfigError: Ray is not installed or not reachable, or the placement group does not fit.
        """
        self._ray = connected_ray()
        self._placement = RayPlacement(self._ray, resources)
        self._worker_arguments = python, memory_bytes, pass_variables
        keys, self._worker_keys = ephemeral_keys()
        self._entrance = TunnelEntrance(node_address(self._ray), keys)
        self._numbers = itertools.count()
        self._free: list[int] = []
        """Numbers of ended processes, whose bundles can be used again."""
        self._served: dict[Future[None], Any] = {}
        """Actors by their running call of ``serve``."""

    def start(self) -> StartedWorker:
        """Create an actor; it becomes ready once Ray has resources for it."""
        number = self._free.pop() if self._free else next(self._numbers)
        name = f"environments-{number}-{uuid.uuid4().hex[:8]}"
        tunnel = self._entrance.open(name)
        remote_class = self._ray.remote(RayEnvironmentWorker).options(
            max_restarts=0, **self._placement.options(number)
        )
        actor = remote_class.remote(self._entrance.address, name, self._worker_keys)
        served: Future[None] = actor.serve.remote(*self._worker_arguments).future()
        self._served[served] = actor

        loop = asyncio.get_running_loop()

        def ended(future: "Future[None]") -> None:
            with suppress(RuntimeError):  # the loop has closed: close() cleans up
                # Not on this thread, which is Ray's and would wait for itself.
                loop.call_soon_threadsafe(self._ended, number, tunnel, future)

        served.add_done_callback(ended)
        return RayWorker(tunnel, self._entrance, partial(self._killed, number))

    def _killed(self, number: int) -> None:
        """Free the bundle for the next actor, which waits until Ray has registered this one's
        end."""
        if self._placement.is_shared:
            self._free.append(number)

    def _ended(self, number: int, tunnel: Tunnel, served: "Future[None]") -> None:
        error = served.exception()
        if isinstance(error, self._ray.exceptions.RayActorError):
            self._entrance.lose(tunnel, f"its actor or node was lost: {error_line(error)}")
        elif error is not None:
            self._entrance.kill(tunnel, f"its actor failed: {error_line(error)}")
        else:
            self._entrance.kill(tunnel, "its actor is gone")
        self._served.pop(served, None)
        if not self._placement.is_shared:
            self._placement.remove(number)
            self._free.append(number)

    def close(self) -> None:
        """End all actors, kill those that do not end in time, and free the placement groups."""
        self._entrance.close()
        left = dict(self._served)
        for future in wait(left, CLOSE_TIMEOUT_S).not_done:
            self._ray.kill(left[future])
        self._placement.remove_all()


class RayWorker:
    """One worker process on a node of the cluster; implements :class:`StartedWorker`."""

    start_timeout_s = 600.0
    """Ray may have to wait for a node."""

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
        """Whether its actor, its node or the connection was lost."""
        return self._tunnel.was_lost

    def kill(self) -> str:
        """Make the actor kill the process with all processes that it started."""
        with suppress(OSError):
            self._entrance.kill(self._tunnel)
        self._on_kill()
        return self._tunnel.how_it_ended or "killed"
