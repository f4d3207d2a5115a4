"""Every engine gets all tensors of a version, whatever it served and whatever became of others.

Engines are dicts here: tensor -> version that it was written for. A patch from version a to b may
be applied to a only.
"""

from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.orchestrator.core.control_driver import ControlDriver
from tidegate.errors import WeightsRefused
from tidegate.orchestrator.core import control_events as wc
from tidegate.orchestrator.core.control_events import Outgoing, Reserved
from tidegate.orchestrator.core.weight_content import (
    LAYERS_MAX,
    PATCHES_MAX,
    UNKNOWN,
    Change,
    WeightContent,
    patch_elements,
    replace_all,
    replace_some,
)
from tidegate.transport.messages import (
    BaseVersions,
    FinishWeightUpdate,
    StartWeightUpdate,
    TensorPatch,
    TensorSpec,
    UpdateWeights,
)

NAMES = ("embedding", "layer", "norm")

Tensors = dict[str, int]


class Engine:
    """Follows the protocol of weight updates."""

    def __init__(self) -> None:
        self.version = 0
        self.tensors: Tensors = dict.fromkeys(NAMES, 0)
        self._staged: Tensors | None = None

    def take(self, message: object, truth: dict[int, Tensors]) -> int | None:
        """Carry out a message; return the version that it staged, if any."""
        match message:
            case StartWeightUpdate():
                self._staged = None
            case UpdateWeights(base_versions=bases, location=location):
                version, _, base = location.partition("<")
                if self._staged is None:
                    self._staged = {} if bases is None else dict(self.tensors)
                    assert bases is None or bases.first <= self.version <= bases.last
                    assert not base or bases == BaseVersions(self.version, self.version)
                if base:
                    assert self._staged == truth[int(base)]
                self._staged |= {spec.name: int(version) for spec in message.tensors}
                return message.version if message.is_last else None
            case FinishWeightUpdate():
                assert self._staged == truth[message.version]
                self.version, self.tensors = message.version, self._staged
        return None


class Fleet:
    """A state machine, its engines, a trainer, and a channel that keeps the buffers it must."""

    def __init__(self) -> None:
        self.control = ControlDriver()
        self.engines: dict[str, Engine] = {}
        self.truth: dict[int, Tensors] = {0: dict.fromkeys(NAMES, 0)}
        """Tensors of each version."""
        self.buffers: set[int] = set()
        self.written: int | None = None
        """Version whose bytes the trainer can make patches from."""
        self.is_refused = False
        """Whether the first engine refuses what it stages next."""
        self.wholes = 0
        self.join()

    def join(self) -> None:
        name = f"engine-{len(self.engines)}"
        self.engines[name] = Engine()
        self.deliver(self.control.join(name))

    def deliver(self, outgoing: Outgoing) -> None:
        """Have engines carry out messages and answer."""
        for name, message in outgoing:
            if isinstance(message, UpdateWeights) and message.location:
                assert int(message.location.partition("<")[0]) in self.buffers
            staged = self.engines[name].take(message, self.truth)
            if staged is not None and self.is_refused and name == "engine-0":
                self.is_refused = False
                self.deliver(self.control.fails(name, staged, "refused"))
            elif staged is not None:
                self.deliver(self.control.staged(name, staged))
            if isinstance(message, FinishWeightUpdate):
                self.deliver(self.control.live(name, message.version))

    def write(self, reserved: Reserved, *names: str, base: int | None = None) -> Outgoing:
        """Publish tensors, as patches of version ``base`` if given; return messages to engines."""
        version = reserved.version
        self.buffers = (self.buffers & reserved.keep) | {version}
        change: Change = replace_some
        patch = None if base is None else TensorPatch(1, 1)
        if base is not None:
            change = partial(patch_elements, base)
        elif set(names) == set(NAMES):
            change = replace_all
            self.wholes += 1
        before = self.truth[reserved.over or 0]
        self.truth[version] = {**before, **dict.fromkeys(names, version)}
        nbytes = 1000 if patch is None else 10
        specs = [TensorSpec(name, "uint8", [nbytes], 0, nbytes, patch=patch) for name in names]
        location = f"{version}" if base is None else f"{version}<{base}"
        chunks = [UpdateWeights(version=version, location=location, tensors=specs)]
        return self.control.publish(version, chunks, change)

    def part(self, name: str) -> Outgoing:
        return self.write(self.control.reserve(is_part=True), name)

    def elements(self) -> None:
        """Publish a whole set, as patches where that is possible."""
        reserved = self.control.reserve(has_deltas=True)
        base = reserved.delta_base_version
        is_known = base is not None and base == self.written
        self.written = reserved.version
        self.deliver(self.write(reserved, *NAMES, base=base if is_known else None))

    def give_way(self) -> Reserved:
        """Begin to publish a part, and reserve the buffer for another one in its place."""
        self.part("layer")
        version = max(self.truth)
        waiting = self.control.ask(wc.ReserveRequested, is_part=True)
        for name in self.engines:
            self.deliver(self.control.fails(name, version, "given up"))
        reserved = self.control.result(waiting)
        assert isinstance(reserved, Reserved)
        return reserved

    def act(self, word: str) -> None:
        match word:
            case "join":
                self.join()
            case "whole":
                self.deliver(self.write(self.control.reserve(), *NAMES))
            case "layer" | "norm":
                self.deliver(self.part(word))
            case "refused":
                self.is_refused = True
                self.deliver(self.part("norm"))
            case "elements":
                self.elements()
            case "another process":
                self.written = None
            case "given way":
                self.deliver(self.write(self.give_way(), "norm"))
            case "not written":
                self.give_way()
                self.control.do(wc.ReserveAbandoned())
            case "cancelled":
                self.part("embedding")
                self.control.do(wc.CallCancelled(self.control.call))
                for name in self.engines:
                    self.deliver(self.control.staged(name, max(self.truth)))
                del self.truth[max(self.truth)]


WORDS = "join,whole,layer,norm,refused,elements,elements,another process,given way,not written"


@given(st.lists(st.sampled_from([*WORDS.split(","), "cancelled"]), max_size=40))
def test_every_engine_has_the_newest_tensors_whenever_it_joins_and_whatever_fails(
    story: list[str],
) -> None:
    fleet = Fleet()
    for word in story:
        fleet.act(word)
        newest = fleet.control.state.weights.base_version
        fleet.truth = {v: tensors for v, tensors in fleet.truth.items() if v <= newest}
        assert [e.tensors for e in fleet.engines.values() if e.tensors != fleet.truth[newest]] == []


def test_a_part_is_refused_where_it_is_not_known_what_it_would_be_laid_over() -> None:
    run = ControlDriver("a")
    run.released.append(7)  # by a process that has crashed
    with pytest.raises(WeightsRefused, match="publish a whole state dict first"):
        run.reserve(is_part=True)
    assert run.reserve().version == 8


def test_a_run_that_sends_deltas_sends_a_whole_set_now_and_then() -> None:
    fleet = Fleet()
    fleet.act("whole")
    assert fleet.control.reserve(has_deltas=True) == Reserved(2, frozenset({1}), None, 1)
    fleet.control.do(wc.ReserveAbandoned())
    for number in range(LAYERS_MAX):
        fleet.deliver(fleet.write(fleet.control.reserve(is_part=True), f"tensor {number}"))
    assert fleet.control.reserve(has_deltas=True).delta_base_version == UNKNOWN


def test_a_whole_set_comes_first_and_again_after_so_many_patches() -> None:
    fleet = Fleet()
    for _ in range(2 * PATCHES_MAX + 2):
        fleet.elements()
    assert fleet.wholes == 2
    assert len(fleet.control.state.weights.kept_buffers) == PATCHES_MAX + 1


def part(version: int, nbytes: int, *, is_patch: bool) -> UpdateWeights:
    patch = TensorPatch(1, 1) if is_patch else None
    spec = TensorSpec("w", "uint8", [nbytes], 0, nbytes, patch=patch)
    return UpdateWeights(version=version, location=f"v{version}", tensors=[spec])


def test_large_patches_have_a_whole_set_follow_sooner() -> None:
    content = replace_all(WeightContent(), [part(1, 1000, is_patch=False)])
    content = patch_elements(1, content, [part(2, 499, is_patch=True)])
    assert content.has_room_for_patches is True
    assert patch_elements(2, content, [part(3, 1, is_patch=True)]).has_room_for_patches is False


def test_tensors_published_in_part_come_after_the_patches_before_them() -> None:
    content = replace_all(WeightContent(), [part(1, 1000, is_patch=False)])
    content = patch_elements(1, content, [part(2, 10, is_patch=True)]).served_as(2)
    content = replace_some(content, [part(3, 500, is_patch=False)])
    assert [m.location for m in content.messages(3, live=None)] == ["v1", "v2", "v3"]
    assert [m.location for m in content.messages(3, live=1)] == ["v2", "v3"]
    [message] = content.messages(3, live=2)
    assert (message.location, message.base_versions) == ("v3", BaseVersions(2, 2))
    assert content.buffers == {1, 2, 3}


def test_a_whole_set_without_a_draft_keeps_the_draft_of_the_version_before_and_its_patches() -> (
    None
):
    def both(version: int, *, is_patch: bool) -> UpdateWeights:
        [spec] = part(version, 100, is_patch=is_patch).tensors
        tensors = [spec, msgspec.structs.replace(spec, name="draft.w")]
        return UpdateWeights(version=version, location=f"v{version}", tensors=tensors)

    def names(content: WeightContent) -> list[tuple[str, list[str]]]:
        messages = content.messages(9, live=None)
        return [(each.location, [spec.name for spec in each.tensors]) for each in messages]

    content = replace_all(WeightContent(), [both(1, is_patch=False)])
    content = patch_elements(1, content, [both(2, is_patch=True)])
    without = replace_all(content, [part(3, 100, is_patch=False)])
    draft = [("v1", ["draft.w"]), ("v2", ["draft.w"])]
    assert names(without) == [("v3", ["w"]), *draft]
    assert without.buffers == {1, 2, 3}
    assert names(replace_all(without, [part(4, 100, is_patch=False)])) == [("v4", ["w"]), *draft]
    assert names(replace_all(without, [both(5, is_patch=False)])) == [("v5", ["w", "draft.w"])]


def test_the_draft_of_a_version_that_a_newer_one_replaces_stays_in_the_buffer() -> None:
    for name, kept in (("w", set[int]()), ("draft.w", {1})):
        run = ControlDriver("a")
        run.reserve()
        [spec] = part(1, 100, is_patch=False).tensors
        tensors = [msgspec.structs.replace(spec, name=name)]
        run.publish(1, [UpdateWeights(version=1, location="v1", tensors=tensors)])
        call = run.ask(wc.ReserveRequested)
        run.fails("a", 1, "v2 was started before it was complete")
        assert run.result(call).keep == kept
        sent = run.publish(2, [part(2, 100, is_patch=False)])
        updates = [message for _, message in sent if isinstance(message, UpdateWeights)]
        assert [update.location for update in updates] == ["v2", *(f"v{each}" for each in kept)]
