"""Engines of a run as Ray actors, each in a placement group.

Ray finds nodes and GPUs, and starts actors again elsewhere when they or their nodes die. It carries
no rollouts and no weights: an actor runs the worker program, which connects to the run over ZeroMQ
like any other, by keys that came as the actor's argument.
"""

import asyncio
import contextlib
import importlib
import io
import logging
import os
import sys
from collections import Counter
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from tidegate.integrations.ray.ray_places import (
    RayPlaces,
    RayRoom,
    connected_ray,
    own_address,
    said,
)
from tidegate.orchestrator.fleet.processes import (
    LOG_LINES_SHOWN,
    RESTARTS_MAX,
    WORKER,
    engine_options,
)
from tidegate.orchestrator.fleet.site import Engines, OnExit
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.transport.addresses import listening_host
from tidegate.transport.security import (
    ENGINE_DEFAULT,
    EngineKeys,
    OrchestratorKeys,
    passing_keys,
    read_engine_keys,
    read_orchestrator_keys,
)

DEFECT = 1
"""The worker's exit status when it failed itself; a fresh process may do better."""


class RayEngine:
    """One engine, in the process that Ray made for it."""

    def __init__(self, arguments: list[str], keys: EngineKeys | None) -> None:
        """What the worker is told. Keys come this way, and touch no disk."""
        self._arguments = arguments
        self._keys = keys

    def serve(self) -> tuple[int, str]:
        """Be an engine until it ends; its exit status, and what it said last.

        After a :data:`DEFECT` this process is to be ended: what it has in memory is in doubt.
        """
        worker: Any = importlib.import_module(WORKER)
        said = _Tail(sys.stderr)
        with contextlib.redirect_stderr(said):
            status = int(worker.main(self._arguments, self._keys))
        return status, said.last_words()

    def pid(self) -> int:
        """Of this process. Answers while it serves."""
        return os.getpid()


class _Tail(io.TextIOBase):
    """Passes text on, and remembers the end of it."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._end = ""

    def write(self, text: str) -> int:
        self._end = (self._end + text)[-4096:]
        self._target.write(text)  # Ray's own stderr doesn't say how much it wrote
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def last_words(self) -> str:
        lines = self._end.splitlines()[-LOG_LINES_SHOWN:]
        if lines and lines[-1].startswith("error: "):
            return lines[-1].removeprefix("error: ")
        return "\n  ".join(lines)


RETRY_S = 0.5
"""Between asking an actor to serve and asking again, while Ray looks for a place for it."""

SHORT_LIFE_S = 30.0
"""An engine that ends sooner has failed; after :data:`RESTARTS_MAX` such ends in a row it is given
up. Lost nodes cost an engine nothing however many they are."""

log = logging.getLogger("tidegate")


class RayCluster:
    """The cluster that this process belongs to; or that RAY_ADDRESS, or a Ray started here, is."""

    def __init__(self, settings: RunSettings) -> None:
        """Connect to it.

        Raises:
            ConfigError: Ray isn't installed, or can't be reached.
        """
        self.ray = connected_ray()
        self.settings = settings
        self.room = RayRoom(self.ray, _places(settings))
        self.address = settings.fleet.address or own_address(self.ray)
        self.keys: OrchestratorKeys | None
        self.engine_keys: EngineKeys | None
        if settings.fleet.keys is not None:
            self.keys = read_orchestrator_keys(settings.fleet.keys)
            self.engine_keys = read_engine_keys(settings.fleet.keys / ENGINE_DEFAULT)
        else:
            self.keys, self.engine_keys = passing_keys()

    def engines(self, address: str, logs: Path, *, on_exit: OnExit) -> Engines:
        """Actors; Ray keeps their logs."""
        host = listening_host(address)
        if host == "0.0.0.0":
            port = address.rpartition(":")[2]
            address = f"tcp://{self.ray.util.get_node_ip_address()}:{port}"
        return RayEngines(self, address, on_exit=on_exit)


class RayEngines:
    """Actors that are engines. All of it happens on the run's loop."""

    def __init__(self, cluster: RayCluster, address: str, *, on_exit: OnExit) -> None:
        self._ray = cluster.ray
        self._room = cluster.room
        self._settings = cluster.settings
        self._keys = cluster.engine_keys
        self._address = address
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._actors: dict[str, Any] = {}
        self._begun_s: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        """Of each engine, in a row."""
        self._is_told: set[str] = set()
        """Engines whose last end was told of already."""
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_over = False
        self.may_restart = False

    @property
    def are_gone(self) -> bool:
        """Whether all were given up."""
        return not self._actors

    def start(self) -> None:
        """Ask Ray for a place for each; it may be long in coming."""
        for index in range(self._settings.fleet.engines):
            name = f"engine-{index}"
            actor = self._ray.remote(RayEngine).options(
                max_restarts=-1,
                max_task_retries=0,  # an end is to be told of at once, not when it is made good
                max_concurrency=2,  # so that it answers while it serves, outside the main thread
                **self._room.options(index),
            )
            arguments = engine_options(
                self._settings.model, self._settings.engine, name, self._address
            )
            self._actors[name] = actor.remote(arguments, self._keys)
            self._serve(name)

    def kill(self, name: str) -> None:
        """End its process; Ray starts another."""
        if name in self._actors:
            self._ray.kill(self._actors[name], no_restart=False)

    def kill_all(self) -> None:
        """For good."""
        for actor in list(self._actors.values()):
            self._ray.kill(actor)

    def stop(self) -> None:
        """End all, and give their places back."""
        self._is_over = True
        for timer in self._timers:
            timer.cancel()
        self.kill_all()
        self._room.give_all_back()

    # ------------------------------------------------------------ one engine

    def _serve(self, name: str) -> None:
        """Have an actor be an engine until it ends; if it has no place yet, as soon as it has."""
        self._begun_s[name] = self._loop.time()
        future: Future[tuple[int, str]] = self._actors[name].serve.remote().future()
        future.add_done_callback(partial(self._ended_elsewhere, name))

    def _ended_elsewhere(self, name: str, future: "Future[tuple[int, str]]") -> None:
        try:
            self._loop.call_soon_threadsafe(self._ended, name, future)
        except RuntimeError:
            return  # the loop has closed: the run is over

    def _ended(self, name: str, future: "Future[tuple[int, str]]") -> None:
        if self._is_over or name not in self._actors:
            return
        error = future.exception()
        lived_s = self._loop.time() - self._begun_s[name]
        if error is None:  # by itself
            status, why = future.result()
            why = why or f"exit status {status}"
            self._failures[name] = 1 if lived_s > SHORT_LIFE_S else self._failures[name] + 1
            self._is_told.discard(name)
            if status == DEFECT:
                self.kill(name)
        else:
            why = f"its actor or node was lost: {said(error)}"
            if lived_s > RETRY_S:  # it did live, and didn't merely wait for a place
                self._is_told.discard(name)
        given_up = not self.may_restart or self._failures[name] > RESTARTS_MAX
        if given_up:
            self._ray.kill(self._actors.pop(name))
        else:
            self._later(name)
        if given_up or name not in self._is_told:
            self._is_told.add(name)
            self._on_exit(name, why)

    def _later(self, name: str) -> None:
        def again() -> None:
            self._timers.discard(timer)
            if not self._is_over and name in self._actors:
                self._serve(name)

        timer = self._loop.call_later(RETRY_S, again)
        self._timers.add(timer)


def _places(settings: RunSettings) -> RayPlaces:
    return RayPlaces(
        cpus=(settings.engine.threads_per_engine or 1) * settings.engine.tensor_parallel,
        gpus=settings.fleet.gpus_per_engine,
        placement_group=settings.fleet.placement_group,
    )
