"""Adapters with versions of their own share an engine and leave each other's turns alone.

The fake model's tokens are a hash of context and adapter version, and its KV says which adapter
version computed it. So a turn that is computed, cached or tagged with another adapter's or another
version's is found. Model-based, by hypothesis.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.external.fake_engine import FakeRunner
from tidegate.engine.execution.runner import Row
from tidegate.engine.scheduling.adapter_versions import AdapterVersions
from tidegate.engine.scheduling.scheduler import EngineScheduler, StepColumns
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.errors import TurnRefused
from tidegate.transport.messages import (
    ABORT,
    LENGTH,
    RUNNING,
    AdapterNeeded,
    KvPolicy,
    PauseMode,
    SamplingParams,
    SubmitTurn,
    SwapAdapter,
    TurnFailed,
)

LIMITS = EngineLimits(
    max_running_turns=4,
    max_step_tokens=12,
    num_blocks=24,
    block_tokens=2,
    context_tokens_max=32,
    vocab_size=4096,
)
Tag = tuple[str, int]


def token_of(context: list[int], tag: Tag) -> int:
    """The fake model: a token depends on the whole context and on the adapter's version."""
    return hash((tuple(context), tag)) % LIMITS.vocab_size


class AdapterRunner(FakeRunner):
    """Fake model whose KV is stamped with the adapter version that computed it."""

    def __init__(self, adapters: AdapterVersions) -> None:
        super().__init__(LIMITS)
        self.adapters = adapters
        self.stamps: dict[int, tuple[int, Tag]] = {}
        """Slot -> token and tag."""
        self.attended: list[Any] = []

    def _run(self, row: Row) -> Iterator[int]:
        tag: Tag = row.adapter if isinstance(row.adapter, tuple) else (row.adapter, self.version)
        if isinstance(row.adapter, tuple):
            assert self.adapters.tensors(row.adapter) == row.adapter  # the right tensors are there
        end = row.start + len(row.token_ids)
        for position, token_id in enumerate(row.token_ids.tolist(), row.start):
            self.stamps[self._slot(row, position)] = (token_id, tag)
        if row.sampling is not None:
            context = [self.stamps[self._slot(row, position)] for position in range(end)]
            self.attended.append([stamp for _, stamp in context])
            yield token_of([token for token, _ in context], tag)


class ReportedTurn:
    """One submitted turn, and what was reported of it."""

    def __init__(self, name: str, pinned: int | None, prompt: list[int], max_tokens: int) -> None:
        self.name, self.pinned, self.prompt, self.max_tokens = name, pinned, prompt, max_tokens
        self.tokens: list[int] = []
        self.tags: list[Tag] = []
        self.kv: list[Tag] = []
        self.finish = RUNNING
        self.is_refused = False


class Engine:
    """Scheduler and runner, driven as the engine loop drives them."""

    def __init__(self, versions_max: int) -> None:
        self.adapters = AdapterVersions(versions_max)
        self.scheduler = EngineScheduler(LIMITS, adapters=self.adapters)
        self.runner = AdapterRunner(self.adapters)
        self.turns: list[ReportedTurn] = []
        self.needed: list[Tag] = []

    def submit(
        self, name: str, prompt: list[int], max_tokens: int, *, version: int | None = None
    ) -> ReportedTurn:
        reported = ReportedTurn(name, version, prompt, max_tokens)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            adapter=name,
            adapter_version=(version or 0) if name else None,
        )
        self.scheduler.submit(
            SubmitTurn(
                turn=len(self.turns),
                token_ids=np.array(prompt, "<i4").tobytes(),
                sampling=sampling,
            )
        )
        self.turns.append(reported)
        self.settle()
        return reported

    def load(
        self, name: str, version: int, *, is_live: bool = False, is_staged: bool = False
    ) -> None:
        self.scheduler.adapter_loaded(
            (name, version), (name, version), is_live=is_live, is_staged=is_staged
        )
        self.settle()

    def swap(
        self, name: str, version: int, mode: PauseMode = "keep", kv_policy: KvPolicy = "recompute"
    ) -> int | None:
        swap = SwapAdapter(name=name, version=version, pause_mode=mode, kv_policy=kv_policy)
        recomputed = self.scheduler.swap_adapter(swap)
        self.settle()
        return recomputed

    def publish(self, name: str, version: int) -> None:
        self.load(name, version, is_staged=True)
        self.swap(name, version)

    def settle(self) -> None:
        ended = self.scheduler.take_ended()
        if ended is not None:
            self._take(ended)
        for reply in self.scheduler.take_replies():
            if isinstance(reply, AdapterNeeded):
                self.needed.append((reply.name, reply.version))
            if isinstance(reply, TurnFailed):
                self.turns[reply.turn].is_refused = True

    def step(self) -> bool:
        self.settle()
        rows = self.scheduler.plan()
        if not rows:
            return False
        self.runner.attended = []
        columns = self.scheduler.complete(self.runner.step(rows))
        if columns is not None:
            self._take(columns)
        self.settle()
        return True

    def _take(self, columns: StepColumns) -> None:
        for part in (columns, *columns.others):
            assert not part.others or part is columns
            handles = np.frombuffer(part.turns, "<u4").tolist()
            counts = np.frombuffer(part.counts, "<u4").tolist() or [1] * len(handles)
            tokens = iter(np.frombuffer(part.token_ids, "<i4").tolist())
            prefills = {prefill.turn: prefill for prefill in part.prefills}
            for handle, count, code in zip(
                handles, counts, part.finish or bytes(len(handles)), strict=True
            ):
                reported = self.turns[handle]
                assert reported.finish == RUNNING
                assert not reported.is_refused
                assert part.adapter == reported.name
                reported.finish = code
                for _ in range(count):
                    self._take_token(
                        reported, next(tokens), (part.adapter, part.version), prefills.get(handle)
                    )
            assert next(tokens, None) is None

    def _take_token(self, reported: ReportedTurn, token: int, tag: Tag, prefill: Any) -> None:
        if prefill is None:
            reported.kv.append(tag)
        else:
            assert prefill.output_tokens == len(reported.tokens)
            reported.kv = [
                (reported.name, span.version)
                for span in prefill.spans
                for _ in range(span.start, span.end)
            ]
        context = reported.prompt + reported.tokens
        assert len(reported.kv) == len(context)
        assert token == token_of(context, tag), "sampled by other weights than the tag says"
        assert reported.kv in self.runner.attended, "KV of other weights than the spans say"
        assert reported.pinned in (None, tag[1])
        reported.tokens.append(token)
        reported.tags.append(tag)


# ---------------------------------------------------------------- examples


def test_a_swap_of_one_adapter_leaves_the_others_running_with_their_kv_and_prefix_cache() -> None:
    engine = Engine(4)
    for name in ("one", "two"):
        engine.publish(name, 1)
    turns = {name: engine.submit(name, [1, 2, 3, 4, 5], 6) for name in ("one", "two", "")}
    engine.step()
    engine.step()
    engine.load("one", 2, is_staged=True)
    assert engine.swap("one", 2) == 1
    before = engine.runner.stamps.copy()
    engine.step()
    written = [stamp for slot, stamp in engine.runner.stamps.items() if before.get(slot) != stamp]
    assert [tag for _, tag in written if tag[0] != "one"].count(("two", 1)) == 1  # one decode each
    while engine.step():
        pass
    assert [tag for _, tag in turns["one"].tags] == [1, 1, 2, 2, 2, 2]
    assert {tag for _, tag in turns["two"].tags} == {1}
    assert {tag for _, tag in turns[""].tags} == {0}
    again = engine.submit("two", [1, 2, 3, 4, 5], 1)
    engine.step()
    assert again.kv == [("two", 1)] * 5
    assert engine.scheduler._queues._cache.cached_blocks > 0


def test_running_turns_end_under_the_old_version_with_wait_while_new_ones_use_the_new_one() -> None:
    engine = Engine(4)
    engine.publish("one", 1)
    old = engine.submit("one", [1, 2, 3], 5)
    engine.step()
    engine.load("one", 2, is_staged=True)
    engine.swap("one", 2, "wait")
    new = engine.submit("one", [1, 2, 3], 5)
    while engine.step():
        pass
    assert {version for _, version in old.tags} == {1}
    assert {version for _, version in new.tags} == {2}


def test_abort_ends_running_turns_of_the_swapped_adapter_only() -> None:
    engine = Engine(4)
    engine.publish("one", 1)
    engine.publish("two", 1)
    aborted, other = engine.submit("one", [1, 2], 9), engine.submit("two", [1, 2], 9)
    engine.step()
    engine.load("one", 2, is_staged=True)
    engine.swap("one", 2, "abort")
    assert (aborted.finish, other.finish) == (ABORT, RUNNING)


def test_a_turn_waits_aside_for_its_adapter_and_asks_for_it_once() -> None:
    engine = Engine(2)
    first, second = engine.submit("one", [1], 1), engine.submit("one", [2], 1)
    assert engine.needed == [("one", 0)]
    assert not engine.step()
    assert engine.scheduler.handles == [0, 1]
    engine.load("one", 7, is_live=True)
    while engine.step():
        pass
    assert first.tags == second.tags == [("one", 7)]


def test_the_least_recently_used_idle_version_leaves_memory_and_comes_back_when_asked_for() -> None:
    engine = Engine(2)
    for name in ("one", "two"):
        engine.publish(name, 1)
    engine.submit("one", [1], 1)
    engine.step()
    engine.publish("three", 1)
    assert engine.adapters.held == [("one", 1), ("three", 1)]
    turn = engine.submit("two", [1], 1)
    assert engine.needed == [("two", 1)]
    engine.load("two", 1, is_live=True)
    engine.step()
    assert turn.tags == [("two", 1)]
    assert len(engine.adapters.held) == 2


def test_busy_adapters_do_not_starve_a_turn_whose_adapter_has_no_room() -> None:
    engine = Engine(1)
    engine.publish("busy", 1)
    engine.submit("busy", [1], 3)
    starving = engine.submit("rare", [1], 1)
    later = engine.submit("busy", [2], 1)
    while engine.step():
        pass
    assert engine.needed == [("rare", 0)]
    assert not later.tokens
    engine.load("rare", 4, is_live=True)
    while engine.step():
        pass
    assert starving.tags == [("rare", 4)]
    assert engine.needed == [("rare", 0), ("busy", 1)]


def test_an_unloaded_adapters_turns_are_refused_and_no_others() -> None:
    engine = Engine(2)
    engine.publish("one", 1)
    engine.publish("two", 1)
    mine, other = engine.submit("one", [1], 9), engine.submit("two", [1], 9)
    unknown = engine.submit("three", [1], 9)
    engine.step()
    engine.scheduler.unload_adapter("one", None)
    engine.scheduler.unload_adapter("three", None)
    engine.settle()
    assert mine.is_refused
    assert unknown.is_refused
    assert not other.is_refused
    assert engine.adapters.held == [("two", 1)]


def test_an_engine_without_such_adapters_refuses_turns_that_name_a_version() -> None:
    engine = Engine(0)
    with pytest.raises(TurnRefused, match="serves no LoRA adapters with weight versions"):
        engine.submit("one", [1], 1)


# ---------------------------------------------------------------- any order


NAMES = ("one", "two", "three")


class MixedAdapters(RuleBasedStateMachine):
    """Turns of the base and of three adapters, in an engine with room for two versions.

    Adapters are published, pinned, evicted and unloaded in any order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(2)
        self.newest = dict.fromkeys(NAMES, 0)
        self.live: dict[str, int] = {}
        self.staged: dict[str, int] = {}

    @rule(name=st.sampled_from(("", *NAMES)), prompt=st.integers(1, 7), tokens=st.integers(1, 5))
    def submit(self, name: str, prompt: int, tokens: int) -> None:
        self.engine.submit(name, list(range(prompt)), tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), prompt=st.integers(1, 7))
    def submit_pinned(self, data: Any, prompt: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        version = data.draw(st.integers(1, self.live[name]))
        self.engine.submit(name, list(range(prompt)), 3, version=version)

    @rule(name=st.sampled_from(NAMES))
    def load(self, name: str) -> None:
        if name not in self.staged:
            self.newest[name] += 1
            self.staged[name] = self.newest[name]
            self.engine.load(name, self.newest[name], is_staged=True)

    @precondition(lambda self: self.staged)
    @rule(
        data=st.data(),
        mode=st.sampled_from(("abort", "keep", "wait")),
        kv_policy=st.sampled_from(("keep", "recompute")),
    )
    def swap(self, data: Any, mode: PauseMode, kv_policy: KvPolicy) -> None:
        name = data.draw(st.sampled_from(sorted(self.staged)))
        version = self.staged.pop(name)
        others = self._others(name)
        cached = self.engine.scheduler._queues._cache.cached_blocks
        assert self.engine.swap(name, version, mode, kv_policy) is not None
        assert self._others(name) == others, "a swap touched another adapter's turns"
        assert self.engine.scheduler._queues._cache.cached_blocks == cached
        self.live[name] = version

    def _others(self, name: str) -> list[Any]:
        # A waiting turn that the swap lets in from aside is no change to a turn.
        return [
            (s.handle, s.computed, s.blocks.copy(), s.node, s.share_at, s.adapter_key)
            for s in self.engine.scheduler._queues.running
            if s.adapter != name
        ]

    @rule()
    def answer(self) -> None:
        """Answer one need as the orchestrator does: once there is such a version."""
        for name, version in list(self.engine.needed):
            wanted = version or self.live.get(name, 0)
            if wanted:
                self.engine.needed.remove((name, version))
                self.engine.load(name, wanted, is_live=wanted == self.live.get(name))
                return

    @rule(steps=st.integers(1, 4))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        if self.engine.turns:
            handle = data.draw(st.integers(0, len(self.engine.turns) - 1))
            self.engine.scheduler.cancel(handle)
            self.engine.settle()

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        self.engine.scheduler.unload_adapter(name, None)
        self.engine.needed = [need for need in self.engine.needed if need[0] != name]
        self.live.pop(name, None)
        self.staged.pop(name, None)
        self.engine.settle()

    @invariant()
    def memory_is_bounded(self) -> None:
        adapters = self.engine.adapters
        # Beside the limit: of each adapter one that is being published, and one that a swap has
        # given to turns while pinned turns still use the version before.
        assert len(adapters.held) <= adapters.versions_max + 2 * len(NAMES)
        used = [held for held in adapters._held.values() if held.users]
        assert adapters._size <= max(adapters.versions_max, len(used))
        self.engine.scheduler.check()

    def teardown(self) -> None:
        """Every turn ends, once all adapters are published and all needs are answered."""
        for name in NAMES:
            self.load(name)
            version = self.staged.pop(name)
            self.engine.swap(name, version, "keep", "recompute")
            self.live[name] = version
        for _ in range(500):
            self.answer()
            if not self.engine.step() and not self.engine.needed:
                break
        assert not self.engine.scheduler.handles, self.engine.scheduler._aside
        for reported in self.engine.turns:
            assert reported.is_refused or reported.finish != RUNNING
            if reported.finish == LENGTH:
                assert len(reported.tokens) == reported.max_tokens
        assert self.engine.adapters.in_use == 0
        assert len(self.engine.adapters.held) <= self.engine.adapters.versions_max


TestMixedAdapters = MixedAdapters.TestCase
TestMixedAdapters.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_swap_frees_the_place_of_a_version_that_was_asked_for_and_is_live_no_more() -> None:
    versions = AdapterVersions(1)
    versions.add(("a", 1), "v1", is_live=True)
    versions.add(("b", 1), "b1", is_live=True)  # takes its place
    assert versions.request(("a", 1))  # never answered: a restarted run has another version
    versions.add(("a", 2), "v2", is_staged=True)
    versions.swap(("a", 2))
    versions.end_swap(("a", 2))
    assert versions.request(("b", 1))
