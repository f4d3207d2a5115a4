"""Every engine gets all tensors of a version, whatever it served and whatever others do.

Engines are dicts here: tensor -> publish that it is from.
"""

import pytest

from tests.orchestrator.core.control_driver import ControlDriver
from tidegate.errors import WeightsRefused
from tidegate.orchestrator.core import control_events as wc
from tidegate.orchestrator.core.control_events import Outgoing
from tidegate.orchestrator.core.weight_content import LAYERS_MAX, UNKNOWN, replace_all, replace_some
from tidegate.transport.messages import (
    BaseVersions,
    FinishWeightUpdate,
    StartWeightUpdate,
    TensorSpec,
    UpdateWeights,
)

NAMES = ("embedding", "layer", "norm")


class Engine:
    """Follows the protocol of weight updates."""

    def __init__(self) -> None:
        self.version = 0
        self.tensors = dict.fromkeys(NAMES, "directory")
        self._staged: dict[str, str] = {}

    def take(self, message: object) -> int | None:
        """Carry out a message; return the version that it staged, if any."""
        match message:
            case StartWeightUpdate():
                self._staged = {}
            case UpdateWeights(base_versions=bases):
                self._staged |= {spec.name: message.location for spec in message.tensors}
                if not message.is_last:
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
    """A state machine, its engines, and a channel that keeps the buffers it must."""

    def __init__(self, *names: str) -> None:
        self.control = ControlDriver()
        self.engines: dict[str, Engine] = {}
        self.buffers: set[int] = set()
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        self.engines[name] = Engine()
        self.deliver(self.control.join(name))

    def deliver(self, outgoing: Outgoing) -> None:
        """Have engines carry out messages and answer."""
        for name, message in outgoing:
            if isinstance(message, UpdateWeights) and message.location:
                assert int(message.location[1:]) in self.buffers
            staged = self.engines[name].take(message)
            if staged is not None:
                self.deliver(self.control.staged(name, staged))
            if isinstance(message, FinishWeightUpdate):
                self.deliver(self.control.live(name, message.version))

    def write(self, *names: str) -> list[UpdateWeights]:
        """Write these tensors to the channel, and drop buffers that need not be kept."""
        reserved = self.control.reserve(is_part=set(names) != set(NAMES))
        self.buffers &= reserved.keep
        self.buffers.add(reserved.version)
        specs = [TensorSpec(name, "uint8", [1], 0, 1) for name in names]
        location = f"v{reserved.version}"
        return [UpdateWeights(version=reserved.version, location=location, tensors=specs)]

    def begin(self, version: int, *names: str) -> Outgoing:
        """Publish all tensors or some; return the messages to engines."""
        chunks = self.write(*names)
        assert chunks[0].version == version
        return self.control.publish(
            version, chunks, replace_all if set(names) == set(NAMES) else replace_some
        )

    def publish(self, version: int, *names: str) -> None:
        """Publish them until every engine serves them."""
        self.deliver(self.begin(version, *names))

    def let_go(self, name: str, version: int) -> None:
        """Have an engine stop copying a version, because a newer one was announced to it."""
        self.deliver(self.control.fails(name, version, "given up"))

    def serves(self, name: str) -> tuple[str, ...]:
        return tuple(self.engines[name].tensors[tensor] for tensor in NAMES)


def test_parts_add_up_and_late_engines_get_all_of_them() -> None:
    fleet = Fleet("a")
    fleet.publish(1, "layer")
    fleet.publish(2, "norm")
    fleet.publish(3, "layer")
    fleet.join("late")
    assert fleet.serves("a") == fleet.serves("late") == ("directory", "v3", "v2")
    assert fleet.buffers >= {2, 3}
    fleet.publish(4, "norm")
    assert fleet.control.state.weights.kept_buffers == {3, 4}


def test_parts_of_a_whole_set_bring_it_to_the_engines_that_lack_it_and_only_to_them() -> None:
    fleet = Fleet("a")
    fleet.publish(1, *NAMES)
    fleet.publish(2, "norm")
    update = fleet.control.state.weights.update
    assert update is not None
    [part] = update.content.messages(2, live=1)
    assert (part.base_versions, [spec.name for spec in part.tensors]) == (
        BaseVersions(1, 1),
        ["norm"],
    )
    fleet.join("late")
    assert fleet.serves("a") == fleet.serves("late") == ("v1", "v1", "v2")


def test_a_part_that_gave_way_to_another_part_is_in_it() -> None:
    fleet = Fleet("a")
    fleet.publish(1, *NAMES)
    fleet.begin(2, "layer")  # no engine has staged it yet
    waiting = fleet.control.ask(wc.ReserveRequested, is_part=True)
    fleet.let_go("a", 2)
    assert fleet.control.result(waiting) == wc.Reserved(3, frozenset({1, 2}), 2, None)
    fleet.control.do(wc.ReserveAbandoned())


def test_a_part_that_gave_way_to_another_is_served_with_it() -> None:
    fleet = Fleet("a")
    fleet.publish(1, *NAMES)
    fleet.begin(2, "layer")
    waiting = fleet.control.ask(wc.ReserveRequested, is_part=True)
    fleet.let_go("a", 2)
    assert fleet.control.result(waiting).version == 3
    fleet.buffers.add(3)
    part = UpdateWeights(version=3, location="v3", tensors=[TensorSpec("norm", "uint8", [1], 0, 1)])
    fleet.deliver(fleet.control.publish(3, [part], replace_some))
    assert fleet.serves("a") == ("v1", "v2", "v3")
    fleet.publish(4, "embedding")
    assert fleet.serves("a") == ("v4", "v2", "v3")


def test_a_part_that_failed_is_not_in_the_next_one() -> None:
    fleet = Fleet("a")
    fleet.publish(1, "embedding")
    fleet.begin(2, "layer")
    fleet.control.do(wc.CallCancelled(fleet.control.call))
    fleet.deliver(fleet.control.staged("a", 2))
    fleet.publish(2, "norm")
    assert fleet.serves("a") == ("v1", "directory", "v2")


def test_a_part_whose_successor_was_never_written_is_not_in_the_next_one() -> None:
    fleet = Fleet("a")
    fleet.publish(1, "embedding")
    fleet.begin(2, "layer")
    waiting = fleet.control.ask(wc.ReserveRequested)
    fleet.let_go("a", 2)
    assert fleet.control.result(waiting).version == 3
    fleet.control.do(wc.ReserveAbandoned())
    fleet.publish(3, "norm")
    assert fleet.serves("a") == ("v1", "directory", "v3")


def test_a_part_is_refused_where_it_is_not_known_what_it_would_be_laid_over() -> None:
    run = ControlDriver("a")
    run.released.append(7)  # by a process that has crashed
    with pytest.raises(WeightsRefused, match="publish a whole state dict first"):
        run.reserve(is_part=True)
    assert run.reserve().version == 8


def test_a_run_that_sends_deltas_sends_a_whole_set_now_and_then() -> None:
    fleet = Fleet("a")
    run = fleet.control
    fleet.publish(1, *NAMES)
    assert run.reserve(has_deltas=True) == wc.Reserved(2, frozenset({1}), None, 1)
    run.do(wc.ReserveAbandoned())
    for version in range(2, LAYERS_MAX + 2):
        name = NAMES[version % 3]
        specs = [TensorSpec(f"{name} {version}", "uint8", [1], 0, 1)]
        run.reserve(is_part=True)
        run.publish(
            version, [UpdateWeights(version=version, location="", tensors=specs)], replace_some
        )
        run.staged("a", version)
        run.live("a", version)
    assert run.reserve(has_deltas=True).delta_base_version == UNKNOWN


def test_a_whole_set_takes_the_place_of_all_parts() -> None:
    fleet = Fleet("a")
    fleet.publish(1, "layer")
    fleet.publish(2, *NAMES)
    fleet.publish(3, "layer")
    assert fleet.serves("a") == ("v2", "v3", "v2")
    assert fleet.control.state.weights.kept_buffers == {2, 3}
