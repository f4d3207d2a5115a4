"""Patches reach every engine in an order that gives it the newest version, whatever it served.

An engine's weights are the version that they are: a patch from version a to b may be applied to a
only.
"""

from functools import partial

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.orchestrator.core.control_driver import ControlDriver
from tidegate.orchestrator.core import control_events as wc
from tidegate.orchestrator.core.control_events import Outgoing
from tidegate.orchestrator.core.weight_content import (
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

WHOLE_BYTES, PATCH_BYTES = 1000, 10


class Engine:
    """Follows the protocol of weight updates."""

    def __init__(self) -> None:
        self.version = self.weights = 0
        self._staged: int | None = None

    def take(self, message: object) -> int | None:
        """Carry out a message; return the version that it staged, if any."""
        match message:
            case StartWeightUpdate():
                self._staged = None
            case UpdateWeights(base_versions=bases, tensors=[spec]):
                if spec.patch is None:
                    self._staged = int(spec.name)
                else:
                    if self._staged is None:
                        assert bases == BaseVersions(self.version, self.version)
                        self._staged = self.weights
                    base, result = map(int, spec.name.split(">"))
                    assert self._staged == base
                    self._staged = result
                return message.version if message.is_last else None
            case FinishWeightUpdate():
                assert self._staged == message.version
                self.version, self.weights = message.version, self._staged
        return None


class Fleet:
    """A state machine, its engines, a trainer, and a channel that keeps the buffers it must."""

    def __init__(self) -> None:
        self.control = ControlDriver()
        self.engines: dict[str, Engine] = {}
        self.buffers: set[int] = set()
        self.written: int | None = None
        """Version whose bytes the trainer can make patches from."""
        self.refusing = ""
        """Engine that refuses what it stages."""
        self.wholes = 0

    def join(self) -> None:
        name = f"engine-{len(self.engines)}"
        self.engines[name] = Engine()
        self.deliver(self.control.join(name))

    def deliver(self, outgoing: Outgoing) -> None:
        """Have engines carry out messages and answer."""
        for name, message in outgoing:
            if isinstance(message, UpdateWeights):
                assert int(message.location) in self.buffers
            staged = self.engines[name].take(message)
            if staged is not None and name == self.refusing:
                self.refusing = ""
                self.deliver(self.control.fails(name, staged, "refused"))
            elif staged is not None:
                self.deliver(self.control.staged(name, staged))
            if isinstance(message, FinishWeightUpdate):
                self.deliver(self.control.live(name, message.version))

    def publish(self) -> None:
        """Publish a set, as a patch where that is possible."""
        reserved = self.control.reserve(has_deltas=True)
        version, base = reserved.version, reserved.delta_base_version
        self.buffers = (self.buffers & reserved.keep) | {version}
        change: Change = replace_all
        spec = TensorSpec(str(version), "uint8", [WHOLE_BYTES], 0, WHOLE_BYTES)
        if base is not None and base == self.written:
            change = partial(patch_elements, base)
            name = f"{base}>{version}"
            spec = TensorSpec(name, "uint8", [1], 0, PATCH_BYTES, patch=TensorPatch(1, 1))
        else:
            self.wholes += 1
        self.written = version
        part = UpdateWeights(version=version, location=str(version), tensors=[spec])
        self.deliver(self.control.publish(version, [part], change))


@settings(deadline=None)
@given(st.lists(st.sampled_from(["publish", "publish", "refused", "join"]), max_size=60))
def test_every_engine_has_the_newest_weights_whenever_it_joins_and_whatever_fails(
    story: list[str],
) -> None:
    fleet = Fleet()
    fleet.join()
    for word in story:
        if word == "join":
            fleet.join()
        else:
            fleet.refusing = "engine-0" if word == "refused" else ""
            fleet.publish()
        newest = fleet.control.state.weights.base_version
        assert {engine.weights for engine in fleet.engines.values()} == {newest}


def test_a_whole_set_comes_first_and_again_after_so_many_patches() -> None:
    fleet = Fleet()
    fleet.join()
    for _ in range(2 * PATCHES_MAX + 2):
        fleet.publish()
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


def test_a_process_that_has_written_nothing_sends_a_whole_set() -> None:
    fleet = Fleet()
    fleet.join()
    fleet.publish()
    fleet.written = None  # another process continues
    fleet.publish()
    assert fleet.wholes == 2
    assert fleet.control.reserve(has_deltas=True).delta_base_version != UNKNOWN


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
