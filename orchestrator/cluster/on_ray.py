"""How do engines run on a Ray cluster? As actors, one placement group each; Ray finds them nodes.

Ray places them, gives them GPUs, and starts them again elsewhere when they or their nodes die. It
carries no rollouts and no weights: an engine connects to the run over ZeroMQ like any other, with
keys that came as its actor's argument and are on no disk.
"""

import asyncio
import logging
from collections import Counter
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from tidegate.errors import ConfigError
from tidegate.orchestrator.cluster.ray_engine import DEFECT, RayEngine
from tidegate.orchestrator.cluster.site import Engines, OnExit
from tidegate.orchestrator.config import RunSettings
from tidegate.orchestrator.fleet.processes import RESTARTS_MAX, engine_options
from tidegate.transport.addresses import listening_host
from tidegate.transport.security import (
    ENGINE_DEFAULT,
    EngineKeys,
    OrchestratorKeys,
    passing_keys,
    read_engine_keys,
    read_orchestrator_keys,
)

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
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                "cluster='ray' needs Ray, which is not installed: "
                'pip install "tidegate[ray]" on every node'
            ) from error
        self._ray: Any = ray
        self._settings = settings
        try:
            if not ray.is_initialized():
                ray.init(log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise ConfigError(f"can't reach the Ray cluster: {error}") from error
        self.address = settings.address or f"tcp://{ray.util.get_node_ip_address()}:*"
        self.keys: OrchestratorKeys | None
        self._engine_keys: EngineKeys | None
        if settings.keys is not None:
            self.keys = read_orchestrator_keys(settings.keys)
            self._engine_keys = read_engine_keys(settings.keys / ENGINE_DEFAULT)
        else:
            self.keys, self._engine_keys = passing_keys()

    def engines(self, address: str, logs: Path, *, on_exit: OnExit) -> Engines:
        """Actors; Ray keeps their logs."""
        host = listening_host(address)
        if host == "0.0.0.0":
            port = address.rpartition(":")[2]
            address = f"tcp://{self._ray.util.get_node_ip_address()}:{port}"
        return RayEngines(self._ray, self._settings, address, self._engine_keys, on_exit=on_exit)


class RayEngines:
    """Actors that are engines. All of it happens on the run's loop."""

    def __init__(
        self,
        ray: Any,
        settings: RunSettings,
        address: str,
        keys: EngineKeys | None,
        *,
        on_exit: OnExit,
    ) -> None:
        self._ray = ray
        self._settings = settings
        self._address = address
        self._keys = keys
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._actors: dict[str, Any] = {}
        self._groups: list[Any] = []
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
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cpus = self._settings.threads_per_engine * self._settings.tensor_parallel
        gpus = self._settings.gpus_per_engine
        bundle: dict[str, float] = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        for index in range(self._settings.engines):
            name = f"engine-{index}"
            # A group of its own: so those that have a place begin, and a node that comes later
            # takes those that have none. Its demand is what autoscalers look at.
            group = placement_group([bundle])
            self._groups.append(group)
            actor = self._ray.remote(RayEngine).options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=-1,
                max_task_retries=0,  # an end is to be told of at once, not when it is made good
                max_concurrency=2,  # so that it answers while it serves, outside the main thread
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
            )
            arguments = engine_options(self._settings, name, self._address)
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
        from ray.util.placement_group import remove_placement_group

        self._is_over = True
        for timer in self._timers:
            timer.cancel()
        self.kill_all()
        for group in self._groups:
            remove_placement_group(group)

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
            why = f"its actor or node was lost: {_said(error)}"
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


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Of an error raised in the actor, Ray gives the traceback: what it was stands at its end.
    return lines[-1] if "Traceback" in str(error) or "ray::" in lines[0] else lines[0]
