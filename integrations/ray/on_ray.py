"""Engines of a run as Ray actors, each in a placement group.

A run with ``cluster="ray"`` uses this module in place of local engine processes. Ray finds nodes
and GPUs, and restarts actors when they or their nodes die. Rollouts and weights do not go through
Ray: an actor runs the worker program, which connects to the run over ZeroMQ with keys from the
actor's arguments.
"""

import asyncio
import contextlib
import importlib
import io
import itertools
import logging
import os
import sys
from collections import Counter
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from tidegate.integrations.ray.ray_resources import (
    RayPlacement,
    RayResources,
    connected_ray,
    error_line,
    node_address,
)
from tidegate.orchestrator.fleet.launcher import Engines, OnExit
from tidegate.orchestrator.fleet.processes import (
    LOG_LINES_REPORTED,
    RESTARTS_MAX,
    STOP_TIMEOUT_S,
    WORKER,
    engine_number,
    engine_options,
)
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.transport.addresses import listening_host
from tidegate.transport.security import (
    ENGINE_DEFAULT,
    EngineKeys,
    OrchestratorKeys,
    ephemeral_keys,
    read_engine_keys,
    read_orchestrator_keys,
)

DEFECT = 1
"""Exit status of a worker that failed because of a defect; a new process may work."""


class RayEngine:
    """Ray actor that is one engine."""

    def __init__(self, arguments: list[str], keys: EngineKeys | None) -> None:
        """Take the worker's arguments and keys; the keys are never written to disk."""
        self._arguments = arguments
        self._keys = keys

    def serve(self) -> tuple[int, str]:
        """Run the worker until it ends; return its exit status and the end of its standard error.

        After :data:`DEFECT` the caller must kill this process, because its memory may be corrupt.
        """
        worker: Any = importlib.import_module(WORKER)
        tail = _Tail(sys.stderr)
        with contextlib.redirect_stderr(tail):
            status = int(worker.main(self._arguments, self._keys))
        return status, tail.last_lines()

    def pid(self) -> int:
        """Return the process id; answers while the engine serves."""
        return os.getpid()


class _Tail(io.TextIOBase):
    """Text stream that passes everything on, and keeps the last 4,096 characters."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._end = ""

    def write(self, text: str) -> int:
        self._end = (self._end + text)[-4096:]
        self._target.write(text)  # Ray's stderr does not return the number of characters
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def last_lines(self) -> str:
        lines = self._end.splitlines()[-LOG_LINES_REPORTED:]
        if lines and lines[-1].startswith("error: "):
            return lines[-1].removeprefix("error: ")
        return "\n  ".join(lines)


RETRY_S = 0.5
"""Pause before an actor is requested to serve again, while Ray searches for resources."""

SHORT_LIFE_S = 30.0
"""An engine that ends sooner has failed. After :data:`RESTARTS_MAX` failures in a row it is
given up; lost nodes do not count."""

log = logging.getLogger("tidegate")


class RayCluster:
    """The Ray cluster of this process, or that of RAY_ADDRESS, or one started here."""

    def __init__(self, settings: RunSettings) -> None:
        """Connect to the cluster.

        Raises:
            ConfigError: Ray is not installed, or can't be reached.
        """
        self.ray = connected_ray()
        self.settings = settings
        self.placement = RayPlacement(self.ray, _resources(settings))
        self.address = settings.fleet.listen_address or node_address(self.ray)
        self.keys: OrchestratorKeys | None
        self.engine_keys: EngineKeys | None
        if settings.fleet.curve_key_directory is not None:
            self.keys = read_orchestrator_keys(settings.fleet.curve_key_directory)
            self.engine_keys = read_engine_keys(settings.fleet.curve_key_directory / ENGINE_DEFAULT)
        else:
            self.keys, self.engine_keys = ephemeral_keys()

    def engines(self, address: str, logs: Path, *, on_exit: OnExit) -> Engines:
        """Return the engines, not started yet; Ray keeps their logs."""
        host = listening_host(address)
        if host == "0.0.0.0":
            port = address.rpartition(":")[2]
            address = f"tcp://{self.ray.util.get_node_ip_address()}:{port}"
        return RayEngines(self, address, on_exit=on_exit)


class RayEngines:
    """The run's engines as actors. Use it on the run's event loop only."""

    def __init__(self, cluster: RayCluster, address: str, *, on_exit: OnExit) -> None:
        self._ray = cluster.ray
        self._placement = cluster.placement
        self._settings = cluster.settings
        self._keys = cluster.engine_keys
        self._address = address
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._actors: dict[str, Any] = {}
        self._started_s: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        """Number of failures in a row, by engine."""
        self._reported: set[str] = set()
        """Engines whose last end was already reported."""
        self._retired: dict[str, Any] = {}
        """Actors of engines that were asked to leave, until they are killed."""
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_stopped = False
        self.may_restart = False

    @property
    def are_gone(self) -> bool:
        """Whether all engines were given up."""
        return not self._actors

    def start(self) -> None:
        """Request an actor for each engine; Ray may need long to find resources."""
        for index in range(self._settings.fleet.engines):
            self._start(index)

    @property
    def names(self) -> list[str]:
        """Names of all engines, by number."""
        return sorted(self._actors, key=engine_number)

    def add(self, count: int) -> list[str]:
        """Request actors for more engines; return their names: the lowest unused numbers."""
        used = {engine_number(name) for name in (*self._actors, *self._retired)}
        numbers = itertools.islice((n for n in itertools.count() if n not in used), count)
        return [self._start(number) for number in numbers]

    def retire(self, name: str) -> None:
        """Kill an engine's actor once it has ended, or in :data:`STOP_TIMEOUT_S`, for good."""
        actor = self._actors.pop(name, None)
        if actor is None:
            return

        def remove() -> None:
            self._timers.discard(timer)
            del self._retired[name]
            self._ray.kill(actor)
            self._placement.remove(engine_number(name))

        timer = self._loop.call_later(STOP_TIMEOUT_S, remove)
        self._timers.add(timer)
        self._retired[name] = actor

    def _start(self, index: int) -> str:
        name = f"engine-{index}"
        actor = self._ray.remote(RayEngine).options(
            max_restarts=-1,
            max_task_retries=0,  # so that a failure is reported at once, and not after a retry
            max_concurrency=2,  # so that pid() answers while serve() runs
            **self._placement.options(index),
        )
        arguments = engine_options(self._settings.model, self._settings.engine, name, self._address)
        self._actors[name] = actor.remote(arguments, self._keys)
        self._failures.pop(name, None)
        self._serve(name)
        return name

    def lost(self, name: str) -> None:
        """Do nothing: the end of the actor's task shows the loss."""

    def kill(self, name: str) -> None:
        """Kill an engine's process; Ray starts another one."""
        if name in self._actors:
            self._ray.kill(self._actors[name], no_restart=False)

    def kill_all(self) -> None:
        """Kill all actors without a restart."""
        for actor in (*self._actors.values(), *self._retired.values()):
            self._ray.kill(actor)

    def stop(self) -> None:
        """Kill all actors, and free their placement groups."""
        self._is_stopped = True
        for timer in self._timers:
            timer.cancel()
        self.kill_all()
        self._placement.remove_all()

    # ------------------------------------------------------------ one engine

    def _serve(self, name: str) -> None:
        """Make the actor serve; the call waits in Ray until the actor has resources."""
        self._started_s[name] = self._loop.time()
        actor = self._actors[name]
        future: Future[tuple[int, str]] = actor.serve.remote().future()
        future.add_done_callback(partial(self._on_serve_done, name, actor))

    def _on_serve_done(self, name: str, actor: Any, future: "Future[tuple[int, str]]") -> None:
        try:
            self._loop.call_soon_threadsafe(self._ended, name, actor, future)
        except RuntimeError:
            return  # the loop has closed: the run is over

    def _ended(self, name: str, actor: Any, future: "Future[tuple[int, str]]") -> None:
        if self._is_stopped or self._actors.get(name) is not actor:
            return
        error = future.exception()
        served_s = self._loop.time() - self._started_s[name]
        if error is None:  # the worker ended
            status, why = future.result()
            why = why or f"exit status {status}"
            self._failures[name] = 1 if served_s > SHORT_LIFE_S else self._failures[name] + 1
            self._reported.discard(name)
            if status == DEFECT:
                self.kill(name)
        else:
            why = f"its actor or node was lost: {error_line(error)}"
            if served_s > RETRY_S:  # it had served, and was not only waiting for resources
                self._reported.discard(name)
        given_up = not self.may_restart or self._failures[name] > RESTARTS_MAX
        if given_up:
            self._ray.kill(self._actors.pop(name))
        else:
            self._serve_later(name)
        if given_up or name not in self._reported:
            self._reported.add(name)
            self._on_exit(name, why)

    def _serve_later(self, name: str) -> None:
        def again() -> None:
            self._timers.discard(timer)
            if not self._is_stopped and name in self._actors:
                self._serve(name)

        timer = self._loop.call_later(RETRY_S, again)
        self._timers.add(timer)


def _resources(settings: RunSettings) -> RayResources:
    return RayResources(
        cpus=(settings.engine.threads_per_engine or 1) * settings.engine.tensor_parallel_size,
        gpus=settings.fleet.gpus_per_engine,
        placement_group=settings.fleet.placement_group,
    )
