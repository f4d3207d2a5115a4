"""Placement of a run's processes on a Ray cluster, in their own or the user's placement groups."""

from dataclasses import dataclass
from typing import Any

from tidegate.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RayResources:
    """Resources of each process of one kind, and its placement group."""

    cpus: float = 1
    gpus: float = 0
    """GPUs that each process sees; a fraction shares a GPU with other processes."""
    placement_group: str | None = None
    """Name of the user's placement group: process ``n`` goes into bundle ``n`` modulo the number
    of bundles. So different kinds of processes that name the same group share bundles. None:
    Tidegate creates placement groups on any node with free resources."""

    def __post_init__(self) -> None:
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus)):
            if not amount >= 0 or (amount > 1 and amount != int(amount)):
                raise ConfigError(
                    f"{name} of RayResources must be 0, a fraction, or a whole number, got {amount}"
                )
        if self.placement_group is None and not self.cpus and not self.gpus:
            raise ConfigError(
                "RayResources need a CPU, a GPU or a placement group; set cpus=, gpus= or "
                "placement_group="
            )


def connected_ray() -> Any:
    """Return `ray`, connected to this process's cluster, that of RAY_ADDRESS, or a new one.

    Raises:
        ConfigError: Ray is not installed, or can't be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            'Ray is not installed; run pip install "tidegate[ray]" on every node'
        ) from error
    try:
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ConfigError(f"can't reach the Ray cluster: {error}") from error
    return ray


def node_address(ray: Any) -> str:
    """Return this node's address in the cluster, with any free port."""
    return f"tcp://{ray.util.get_node_ip_address()}:*"


class RayPlacement:
    """Placement groups of the processes of one kind."""

    def __init__(self, ray: Any, resources: RayResources, *, gang_size: int | None = None) -> None:
        """Find the user's placement group, or create one.

        Without the user's group, ``gang_size`` processes are placed all at once or not at
        all. If it is None, each process has a group of its own, so that processes start
        as soon as their own resources are free.

        Raises:
            ConfigError: there is no group of that name, or its bundles are too small.
        """
        self._ray = ray
        self._resources = resources
        self._own: dict[int, Any] = {}
        self._shared: Any = None
        self._is_shared_own = False
        if resources.placement_group is not None:
            self._shared = _user_group(ray, resources.placement_group)
            for bundle in self._shared.bundle_specs:
                _check_bundle(resources, bundle)
        elif gang_size is not None:
            self._shared = self._create_group(gang_size)
            self._is_shared_own = True

    @property
    def is_shared(self) -> bool:
        """Whether process ``n`` has a fixed bundle of a group that it shares with others."""
        return self._shared is not None

    def options(self, index: int) -> dict[str, Any]:
        """Return an actor's resources and placement. Ray may take long to find the resources."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._shared is not None:
            group, bundle = self._shared, index % self._shared.bundle_count
        else:
            if index not in self._own:
                self._own[index] = self._create_group(1)
            group, bundle = self._own[index], 0
        return {
            "num_cpus": self._resources.cpus,
            "num_gpus": self._resources.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
        }

    def _create_group(self, bundles: int) -> Any:
        """Create a placement group; autoscalers see its demand."""
        from ray.util.placement_group import placement_group

        resources_per_bundle = {"CPU": self._resources.cpus, "GPU": self._resources.gpus}
        return placement_group(
            [{name: n for name, n in resources_per_bundle.items() if n}] * bundles
        )

    def remove(self, index: int) -> None:
        """Remove one process's own placement group."""
        from ray.util.placement_group import remove_placement_group

        group = self._own.pop(index, None)
        if group is not None:
            remove_placement_group(group)

    def remove_all(self) -> None:
        """Remove all groups created here, but not those of the user."""
        from ray.util.placement_group import remove_placement_group

        if self._is_shared_own:
            remove_placement_group(self._shared)
            self._is_shared_own = False
        for index in list(self._own):
            self.remove(index)


def error_line(error: BaseException) -> str:
    """Return the error of an actor's call in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # For an error raised in the actor, Ray returns the traceback, whose last line names it.
    return lines[-1] if "Traceback" in str(error) or "ray::" in lines[0] else lines[0]


def _user_group(ray: Any, name: str) -> Any:
    try:
        return ray.util.get_placement_group(name)
    except ValueError as error:
        raise ConfigError(
            f"Ray has no placement group named {name!r} in this namespace; create it first: "
            f"ray.util.placement_group(bundles, name={name!r})"
        ) from error


def _check_bundle(resources: RayResources, bundle: dict[str, float]) -> None:
    for name, needed in (("CPU", resources.cpus), ("GPU", resources.gpus)):
        if needed > bundle.get(name, 0):
            raise ConfigError(
                f"each process needs {needed:g} {name}, but a bundle of placement group "
                f"{resources.placement_group!r} has {bundle.get(name, 0):g}; create the group with "
                f"larger bundles, or lower RayResources"
            )
