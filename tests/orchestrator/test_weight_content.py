"""Does every engine get all of a version's tensors, whatever it served and what became of others?

Engines are dicts here: of which publish each tensor is.
"""

from tidegate.orchestrator.weights.content import anew, laid_over
from tidegate.orchestrator.weights.weights import Outgoing, WeightCoordinator
from tidegate.transport.messages import (
    Bases,
    FinishWeightUpdate,
    InitWeights,
    StartWeightUpdate,
    TensorSpec,
    UpdateWeights,
)

NAMES = ("embedding", "layer", "norm")


class Engine:
    """Serves what it is told to, by the rules of the protocol."""

    def __init__(self) -> None:
        self.version = 0
        self.tensors = dict.fromkeys(NAMES, "directory")
        self._staged: dict[str, str] = {}

    def take(self, message: object) -> int | None:
        """Do as a message says; return a version that is staged by it."""
        match message:
            case StartWeightUpdate():
                self._staged = {}
            case UpdateWeights(bases=bases):
                self._staged |= {spec.name: message.location for spec in message.tensors}
                if not message.last:
                    return None
                if bases is not None:
                    assert bases.first <= self.version <= bases.last
                    self._staged = self.tensors | self._staged
                assert self._staged.keys() == set(NAMES)
                return message.version
            case FinishWeightUpdate():
                self.version, self.tensors = message.version, self._staged
        return None


class Fleet:
    """A coordinator, its engines, and a channel that keeps what it must."""

    def __init__(self, *names: str) -> None:
        self.weights = WeightCoordinator(
            InitWeights(channel="shm"), pause_mode="keep", kv_policy="keep"
        )
        self.engines: dict[str, Engine] = {}
        self.buffers: set[int] = set()
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        self.engines[name] = Engine()
        self.deliver(self.weights.joined(name, 0))

    def deliver(self, outgoing: Outgoing) -> None:
        for name, message in outgoing:
            if isinstance(message, UpdateWeights) and message.location:
                assert int(message.location[1:]) in self.buffers
            staged = self.engines[name].take(message)
            if staged is not None:
                self.weights.staged(name, staged)
            if isinstance(message, FinishWeightUpdate):
                self.weights.live(name, message.version)

    def write(self, version: int, *names: str) -> list[UpdateWeights]:
        """Have the channel hold these tensors, and what must be kept beside them."""
        weights = self.weights
        self.buffers &= weights.kept_buffers | weights.buffers_before
        self.buffers.add(version)
        specs = [TensorSpec(name, "uint8", [1], 0, 1) for name in names]
        return [UpdateWeights(version=version, location=f"v{version}", tensors=specs)]

    def publish(self, version: int, *names: str) -> None:
        """All of the names, or a part of them, until every engine serves them."""
        self.weights.supersede(version)
        change = anew if set(names) == set(NAMES) else laid_over
        self.deliver(self.weights.publish(version, self.write(version, *names), change))
        self.weights.release()
        self.deliver(self.weights.swaps())

    def serves(self, name: str) -> tuple[str, ...]:
        return tuple(self.engines[name].tensors[tensor] for tensor in NAMES)


def test_parts_add_up_and_late_engines_get_all_of_them() -> None:
    fleet = Fleet("a")
    fleet.publish(1, "layer")
    fleet.publish(2, "norm")
    fleet.publish(3, "layer")
    fleet.join("late")
    fleet.deliver(fleet.weights.swaps())
    assert fleet.serves("a") == fleet.serves("late") == ("directory", "v3", "v2")
    assert fleet.buffers >= {2, 3}
    fleet.publish(4, "norm")
    assert fleet.weights.kept_buffers == {3, 4}


def test_parts_of_a_whole_set_bring_it_to_who_lacks_it_and_only_to_them() -> None:
    fleet = Fleet("a")
    fleet.publish(1, *NAMES)
    fleet.publish(2, "norm")
    update = fleet.weights.update
    assert update is not None
    [part] = update.content.messages(2, live=1)
    assert (part.bases, [spec.name for spec in part.tensors]) == (Bases(1, 1), ["norm"])
    fleet.join("late")
    fleet.deliver(fleet.weights.swaps())
    assert fleet.serves("a") == fleet.serves("late") == ("v1", "v1", "v2")


def test_a_part_that_gave_way_to_another_part_is_in_it() -> None:
    fleet = Fleet("a")
    fleet.publish(1, *NAMES)
    fleet.weights.publish(2, fleet.write(2, "layer"), laid_over)  # nobody has staged it yet
    fleet.publish(3, "norm")
    assert fleet.serves("a") == ("v1", "v2", "v3")
    fleet.publish(4, "embedding")
    assert fleet.serves("a") == ("v4", "v2", "v3")


def test_a_part_that_failed_is_not_in_the_next_one() -> None:
    fleet = Fleet("a")
    fleet.publish(1, "embedding")
    fleet.weights.publish(2, fleet.write(2, "layer"), laid_over)
    fleet.weights.withdraw()
    fleet.publish(2, "norm")
    assert fleet.serves("a") == ("v1", "directory", "v2")


def test_a_part_whose_successor_was_never_written_is_not_in_the_next_one() -> None:
    fleet = Fleet("a")
    fleet.publish(1, "embedding")
    fleet.weights.publish(2, fleet.write(2, "layer"), laid_over)
    fleet.weights.supersede(3)
    fleet.weights.unreserve()
    fleet.publish(4, "norm")
    assert fleet.serves("a") == ("v1", "directory", "v4")


def test_a_whole_set_takes_the_place_of_all_parts() -> None:
    fleet = Fleet("a")
    fleet.publish(1, "layer")
    fleet.publish(2, *NAMES)
    fleet.publish(3, "layer")
    assert fleet.serves("a") == ("v2", "v3", "v2")
    assert fleet.weights.kept_buffers == {2, 3}
