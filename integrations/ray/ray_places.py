"""Where does Ray put a run's processes? In placement groups of their own, or in the user's.

It knows resources and bundles; not what a process does there.
"""

from dataclasses import dataclass
from typing import Any

from tidegate.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPlaces:
    """What each process of one kind gets of Ray's resources, and where."""

    cpus: float = 1
    gpus: float = 0
    """A process sees these and no others; half of one is shared with whoever has the other."""
    placement_group: str | None = None
    """The name of one of the user's: process ``n`` goes into its bundle ``n``, beginning again
    where there are fewer. So kinds that name the same group are together, bundle by bundle. None:
    Tidegate makes groups, wherever there is room."""

    def __post_init__(self) -> None:
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus)):
            if not amount >= 0 or (amount > 1 and amount != int(amount)):
                raise ConfigError(
                    f"{name} of a place must be 0, a part of one, or a whole number, got {amount}"
                )
        if self.placement_group is None and not self.cpus and not self.gpus:
            raise ConfigError(
                "a place of no CPU and no GPU is nowhere; set cpus=, or name a placement_group"
            )


def connected_ray() -> Any:
    """Ray's module, connected to the cluster that this process belongs to, or that RAY_ADDRESS is,
    or to one that is started here.

    Raises:
        ConfigError: Ray isn't installed, or can't be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "places on Ray's nodes were asked for, and Ray is not installed: "
            'pip install "tidegate[ray]" on every node'
        ) from error
    try:
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ConfigError(f"can't reach the Ray cluster: {error}") from error
    return ray


def own_address(ray: Any) -> str:
    """Any free port of this node's address, by which other nodes reach it."""
    return f"tcp://{ray.util.get_node_ip_address()}:*"


class RayRoom:
    """The places of processes of one kind."""

    def __init__(self, ray: Any, places: RayPlaces, *, together: int | None = None) -> None:
        """Look the user's group up, if there is one.

        Without one, ``together`` is how many processes are to be placed all at once or not at all;
        left out, each has a group of its own, so that those that have a place begin, and a node
        that comes later takes those that have none.

        Raises:
            ConfigError: there is none of that name, or its bundles are too small.
        """
        self._ray = ray
        self._places = places
        self._own: dict[int, Any] = {}
        self._shared: Any = None
        self._is_shared_own = False
        if places.placement_group is not None:
            self._shared = _group_of(ray, places.placement_group)
            for bundle in self._shared.bundle_specs:
                _check_bundle(places, bundle)
        elif together is not None:
            self._shared = self._made(together)
            self._is_shared_own = True

    @property
    def is_shared(self) -> bool:
        """Whether process ``n`` has its bundle beforehand, and no other can take its place."""
        return self._shared is not None

    def options(self, index: int) -> dict[str, Any]:
        """For an actor: what it gets, and where. Ray may be long in finding that place."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._shared is not None:
            group, bundle = self._shared, index % self._shared.bundle_count
        else:
            if index not in self._own:
                self._own[index] = self._made(1)
            group, bundle = self._own[index], 0
        return {
            "num_cpus": self._places.cpus,
            "num_gpus": self._places.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
        }

    def _made(self, bundles: int) -> Any:
        """Its demand is what autoscalers look at."""
        from ray.util.placement_group import placement_group

        wanted = {"CPU": self._places.cpus, "GPU": self._places.gpus}
        return placement_group([{name: n for name, n in wanted.items() if n}] * bundles)

    def give_back(self, index: int) -> None:
        """One process's place, where it was its own."""
        from ray.util.placement_group import remove_placement_group

        group = self._own.pop(index, None)
        if group is not None:
            remove_placement_group(group)

    def give_all_back(self) -> None:
        """What is of the user's group stays the user's."""
        from ray.util.placement_group import remove_placement_group

        if self._is_shared_own:
            remove_placement_group(self._shared)
            self._is_shared_own = False
        for index in list(self._own):
            self.give_back(index)


def said(error: BaseException) -> str:
    """What an actor's call failed of, in a line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Of an error raised in the actor, Ray gives the traceback: what it was stands at its end.
    return lines[-1] if "Traceback" in str(error) or "ray::" in lines[0] else lines[0]


def _group_of(ray: Any, name: str) -> Any:
    try:
        return ray.util.get_placement_group(name)
    except ValueError as error:
        raise ConfigError(
            f"Ray has no placement group named {name!r} in this namespace; make it first: "
            f"ray.util.placement_group(bundles, name={name!r})"
        ) from error


def _check_bundle(places: RayPlaces, bundle: dict[str, float]) -> None:
    for name, wanted in (("CPU", places.cpus), ("GPU", places.gpus)):
        if wanted > bundle.get(name, 0):
            raise ConfigError(
                f"a process is to have {wanted:g} {name}, and a bundle of placement group "
                f"{places.placement_group!r} has {bundle.get(name, 0):g}; nothing would ever be "
                f"placed there"
            )
