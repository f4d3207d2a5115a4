"""The core's promises under any order of events: a hypothesis state machine checks every step."""

from collections import Counter
from itertools import takewhile

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.orchestrator.core.driver import Driver
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.policies.asynchrony import BoundedStaleness, DeadlinePolicy, Order
from tidegate.policies.consumption import Window
from tidegate.transport.messages import ABORT, RUNNING, STOP

ORDERS: tuple[Order, ...] = ("admission", "completion", "completion")

pick = st.integers(min_value=0, max_value=10**6)


class AnyRun(RuleBasedStateMachine):
    """Engines come, go, abort and lag; episodes fail; the trainer asks and publishes any time."""

    @initialize(
        eta=st.integers(0, 3),
        batch=st.integers(1, 3),
        size=st.integers(1, 3),
        order=st.one_of(st.sampled_from(ORDERS), st.builds(Window, st.integers(1, 6))),
        deadline_policy=st.sampled_from(("wait", "wait", "mask", "split", "split", "drop")),
        batches=st.sampled_from((1, 1, 2)),
        after_versions=st.sampled_from((None, 1, 1, 2)),
    )
    def start(
        self,
        eta: int,
        batch: int,
        size: int,
        order: Order,
        deadline_policy: DeadlinePolicy,
        batches: int,
        after_versions: int | None,
    ) -> None:
        if deadline_policy == "split" or (deadline_policy != "wait" and order == "admission"):
            order = "completion"
        self.policy = BoundedStaleness(
            max_staleness=eta,
            groups_per_batch=batch,
            consumption_order=order,
            deadline_policy=deadline_policy,
            batches_per_version=batches,
            just_in_time_after_versions=after_versions,
        )
        self.driver = Driver(policy=self.policy, group_size=size)
        self.driver.join("engine-0")
        self.engines_made = 1
        self.batch_requests = 0
        self.has_rolled_back = False
        self.discarded_rows: dict[int, set[int]] = {}
        """Batch -> indices of rows that the trainer has skipped."""

    # ------------------------------------------------------------ engines

    @rule(is_current=st.booleans())
    def an_engine_joins(self, is_current: bool) -> None:
        if len(self.driver.engines) < 4:
            self.driver.join(f"engine-{self.engines_made}", None if is_current else 0)
            self.engines_made += 1

    @precondition(lambda self: len(self.driver.engines) > 1)
    @rule(which=pick)
    def an_engine_is_lost(self, which: int) -> None:
        self.driver.leave(sorted(self.driver.engines)[which % len(self.driver.engines)])

    @rule(which=pick, tokens=st.integers(0, 4), finish=st.sampled_from([RUNNING, STOP, ABORT]))
    def tokens_arrive(self, which: int, tokens: int, finish: int) -> None:
        turns = [(name, h) for name, e in self.driver.engines.items() for h in e.turns]
        if not turns:
            return
        name, handle = turns[which % len(turns)]
        left = self.driver.engines[name].turns[handle].sampling.max_tokens
        tokens = min(tokens, left - self.driver.engines[name].sampled[handle])
        self.driver.sample(name, handle, max(tokens, 1 if finish == STOP else 0), finish)

    @rule(which=pick)
    def an_engine_refuses_a_turn_in_its_midst(self, which: int) -> None:
        held = [(name, h) for name, e in sorted(self.driver.engines.items()) for h in e.turns]
        if held and which % 3 == 0:
            name, handle = held[which % len(held)]
            del self.driver.engines[name].turns[handle]
            self.driver.do(ev.TurnRejected(name, handle, "a processor raised"))

    @rule(which=pick, abort=st.booleans())
    def an_engine_swaps(self, which: int, abort: bool) -> None:
        names = sorted(self.driver.engines)
        self.driver.swap(names[which % len(names)], abort=abort)

    # ------------------------------------------------------------ episodes

    @rule()
    def tasks_arrive(self) -> None:
        self.driver.fill()

    @rule(which=pick)
    def an_episode_continues(self, which: int) -> None:
        idle = [
            r
            for r in self.driver.running.values()
            if not r.turns or r.turns[-1].finish_reason is not None
        ]
        if not idle:
            return
        rollout = idle[which % len(idle)]
        if rollout.turns and which % 3:
            self.driver.return_reward(rollout, float(which % 2))
        else:
            self.driver.ask_turn(rollout)

    @rule(which=pick, count=st.integers(1, 12))
    def some_episodes_run_to_their_end(self, which: int, count: int) -> None:
        for _ in range(min(count, len(self.driver.running))):
            rollouts = list(self.driver.running.values())
            self.finish(rollouts[which % len(rollouts)])

    def finish(self, rollout: Rollout) -> None:
        if not rollout.turns or rollout.turns[-1].finish_reason is not None:
            self.driver.ask_turn(rollout)
        where = self.driver.where(rollout)
        if where is not None:
            self.driver.sample(*where, 1, STOP)
            self.driver.return_reward(rollout)

    @rule(which=pick)
    def an_episode_fails(self, which: int) -> None:
        if self.driver.running and which % 5 == 0:
            rollouts = list(self.driver.running.values())
            self.driver.fail(rollouts[which % len(rollouts)])

    # ------------------------------------------------------------ the trainer

    @rule()
    def the_trainer_asks(self) -> None:
        if len(self.driver.batches) + len(self.driver.refused) == self.batch_requests:
            self.batch_requests += 1
            self.driver.do(ev.BatchRequested())

    @precondition(lambda self: len(self.driver.batches) > self.driver.batches_published)
    @rule(swap=st.sampled_from(["all", "some", "none"]))
    def the_trainer_publishes_when_it_may(self, swap: str) -> None:
        self.the_trainer_publishes(swap)

    def the_trainer_publishes(self, swap: str) -> None:
        self.driver.publish()
        for name in sorted(self.driver.engines):
            if swap == "all" or (swap == "some" and self.driver.chance.random() < 0.5):
                self.driver.swap(name)

    @rule(is_published=st.booleans())
    def a_batch_is_trained_and_published(self, is_published: bool) -> None:
        """Run a whole batch, so that rare events also happen in deep states."""
        self.driver.fill()
        self.the_trainer_asks()
        for rollout in list(self.driver.running.values()):
            self.finish(rollout)
        if is_published and len(self.driver.batches) > self.driver.batches_published:
            self.the_trainer_publishes("all")

    # ------------------------------------------------------------ crashes

    @rule(which=pick, snapshot=st.booleans())
    def the_process_dies_after_its_checkpoint(self, which: int, snapshot: bool) -> None:
        """Resume without a publish since the checkpoint, so that no version is lost."""
        handed = self.driver.core.handed
        oldest = max(handed.checkpointed, self.driver.batches_published)
        batches = oldest + which % (handed.count - oldest + 1)
        self.driver.die_and_resume(batches, snapshot=snapshot)
        self.batch_requests = len(self.driver.batches) + len(self.driver.refused)
        self.discarded_rows = {n: rows for n, rows in self.discarded_rows.items() if n <= batches}

    @rule(which=pick, snapshot=st.booleans())
    def the_process_dies_and_its_newest_weights_with_it(self, which: int, snapshot: bool) -> None:
        handed = self.driver.core.handed
        if which % 4:
            return
        batches = handed.checkpointed + which % (handed.count - handed.checkpointed + 1)
        self.driver.die_and_resume(batches, snapshot=snapshot)
        self.batch_requests = len(self.driver.batches) + len(self.driver.refused)
        self.discarded_rows = {n: rows for n, rows in self.discarded_rows.items() if n <= batches}
        self.has_rolled_back = True

    @rule(which=pick)
    def an_episode_diverges(self, which: int) -> None:
        """After a resume, an episode repeats some turns and tokens, and then diverges."""
        running = list(self.driver.running.values())
        if running:
            rollout = running[which % len(running)]
            turns = which % (len(rollout.turns) + 1)
            tokens = len(rollout.token_ids) if turns == len(rollout.turns) else 0
            if turns < len(rollout.turns):
                tokens = rollout.turns[turns].start
            self.driver.do(ev.RolloutCut(rollout.rollout_id, turns, tokens, "went_another_way"))

    @rule(which=pick)
    def a_checkpoint_is_safe(self, which: int) -> None:
        handed = self.driver.core.handed
        batches = handed.checkpointed + which % (handed.count - handed.checkpointed + 1)
        self.driver.do(ev.BatchesCheckpointed(batches, self.driver.core.tasks.offer))

    @rule(which=pick, places=st.lists(st.integers(0, 20), max_size=4))
    def the_trainer_leaves_rows_out(self, which: int, places: list[int]) -> None:
        """Leave rows out of any batch that is in no checkpoint, repeatedly too."""
        kept = self.driver.core.handed.kept
        if not kept:
            return
        batch = kept[which % len(kept)]
        rows = tuple(place % len(batch.rows) for place in places)
        self.driver.do(ev.RowsDiscarded(batch.number, rows, "discarded_rows"))
        self.discarded_rows.setdefault(batch.number, set()).update(rows)

    @rule(which=pick)
    def a_connection_breaks(self, which: int) -> None:
        names = sorted(self.driver.engines)
        self.driver.come_back(names[which % len(names)])

    @rule()
    def what_is_counted_of_groups_is_what_they_are(self) -> None:
        """Check the counters at random times only, because reading ``ended_ahead`` updates it."""
        groups = self.driver.core.groups
        in_order = sorted(groups.in_order, key=lambda group: group.group_id)
        ahead = takewhile(lambda group: not group.running, in_order)
        assert groups.ended_ahead == len(list(ahead))
        assert groups.counts_by_version == Counter(
            group.oldest_possible_version for group in in_order
        )
        assert groups.ended_counts_by_version == Counter(
            group.oldest_possible_version for group in groups.ended
        )

    # ------------------------------------------------------------ what must hold

    @invariant()
    def no_sample_is_trained_twice_or_out_of_order_or_too_old(self) -> None:
        if not hasattr(self, "driver"):
            return
        groups = [group for batch in self.driver.batches for group in batch.groups]
        ids = [group.group_id for group in groups]
        assert len(ids) == len(set(ids))
        if self.policy.consumption_order == "admission":
            assert self.has_rolled_back or ids == sorted(ids)
        keys = [group.key for group in groups if not group.is_split_remainder]
        assert len(keys) == len(set(keys))
        bound = self.driver.core.policy.guaranteed_bound
        assert bound is not None
        for batch in self.driver.batches:
            rollouts = [rollout for group in batch.groups for rollout in group.kept]
            oldest = [v for r in rollouts if (v := r.oldest_trained_version) is not None]
            assert all(0 <= batch.trainer_version - version <= bound for version in oldest)

    @invariant()
    def rows_that_the_trainer_discarded_are_discarded_and_all_others_trained(self) -> None:
        if not hasattr(self, "driver"):
            return
        tokens: Counter[str] = Counter(trained=0, discarded_rows=0)
        rollouts = set()
        for batch in self.driver.batches:
            places = self.discarded_rows.get(batch.number, set())
            rows = [row for group in batch.groups for row in group.kept]
            for place, row in enumerate(rows):
                account = "discarded_rows" if place in places else "trained"
                tokens[account] += row.sampled_tokens - row.masked_tokens
                if account == "trained":
                    rollouts.add(row.root.rollout_id)
        core = self.driver.core
        assert tokens["trained"] == core.ledger.trained
        assert tokens["discarded_rows"] == core.ledger.discarded["discarded_rows"]
        assert len(rollouts) == core.trained.rollouts
        assert sum(core.trained.staleness.values()) <= len(rollouts)

    @invariant()
    def handing_over_refused_no_group(self) -> None:
        """Admission alone keeps the bound, if every publish follows a batch, or as many as a
        version is declared to be made from."""
        if not hasattr(self, "driver") or self.has_rolled_back:
            return
        if self.policy.deadline_policy == "wait" and self.policy.batches_per_version == 1:
            assert self.driver.core.discarded_rollouts["stale"] == 0

    @invariant()
    def spans_cover_every_token_once(self) -> None:
        if not hasattr(self, "driver"):
            return
        for rollout in self.driver.running.values():
            for turn in rollout.turns:
                edges = [(span.start, span.end) for span in turn.spans()]
                assert [start for start, _ in edges[1:]] == [end for _, end in edges[:-1]]
                assert (edges[-1][1] if edges else 0) == turn.length


AnyRun.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestAnyRun = AnyRun.TestCase
