"""By which policies does a simulated run's core decide, and what do they promise?

What is promised is worked out here apart from the policies, which are what is tested.
"""

import random
from typing import Annotated, Literal, get_args

import msgspec

from tidegate.policies.asynchrony import BoundedStaleness, OnDeadline, OneStepOffPolicy, Unbounded
from tidegate.policies.consumption import Window
from tidegate.policies.filters import DynamicSampling, GroupFilter
from tidegate.policies.rounds import OverSampling, Synchronous, TailPacking
from tidegate.policies.routing import PowerOfTwoChoices, PrefixAffinity, SessionAffinity
from tidegate.policies.speeds import MeasuredSpeeds
from tidegate.policies.staleness import StalenessPolicy
from tidegate.policies.stragglers import EvenOut, LongTailLane

OrderName = Literal["admission", "completion", "window"]

PlacementName = Literal["plain", "session", "prefix", "two-choices", "speeds", "lane", "even"]

PolicyName = Literal[
    "bounded", "synchronous", "one-step", "unbounded", "over-sampling", "tail-packing"
]

Count = Annotated[int, msgspec.Meta(ge=1)]


class ScenarioRules(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    dict=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The policies of one run."""

    seed: int = 0
    """Of all that is drawn while it runs: delays, lengths of answers, what episodes do."""

    max_staleness: int = 0
    group_size: int = 1
    groups_per_batch: int = 1
    outstanding_groups_limit: int | None = None
    policy: PolicyName = "bounded"
    order: OrderName = "admission"
    window_groups: Count = 1
    on_deadline: OnDeadline = "wait"
    filters_groups: bool = False
    """Whether groups of equal rewards are dropped."""
    decide_after: int | None = None
    placement: PlacementName = "plain"

    def group_filter(self) -> GroupFilter:
        """Which groups are trained on."""
        if self.filters_groups:
            return DynamicSampling(decide_after=self.decide_after)
        return GroupFilter()

    def placement_settings(self) -> dict[str, object]:
        """The settings that say where turns go."""
        settings: dict[PlacementName, dict[str, object]] = {
            "plain": {},
            "session": {"routing": SessionAffinity(margin_turns=2)},
            "prefix": {"routing": PrefixAffinity(margin_turns=2)},
            "two-choices": {"routing": PowerOfTwoChoices(seed=self.seed)},
            "speeds": {"engine_speeds": MeasuredSpeeds()},
            "lane": {"stragglers": LongTailLane(min_tokens=8, engines=1, slots=2, check_steps=2)},
            "even": {"stragglers": EvenOut(gap_turns=2, check_steps=2)},
        }
        return settings[self.placement]

    def staleness_policy(self) -> StalenessPolicy:
        """Who may start, and what is trained next."""
        batch, limit = self.groups_per_batch, self.outstanding_groups_limit
        match self.policy:
            case "synchronous":
                return Synchronous(groups_per_batch=batch)
            case "one-step":
                return OneStepOffPolicy(groups_per_batch=batch)
            case "unbounded":
                return Unbounded(groups_per_batch=batch, outstanding_groups_limit=3 * batch)
            case "over-sampling":
                return OverSampling(groups_per_batch=batch, factor=2.0)
            case "tail-packing":
                return TailPacking(groups_per_batch=batch, factor=1.5)
            case "bounded":
                window = Window(self.window_groups)
                return BoundedStaleness(
                    max_staleness=self.max_staleness,
                    groups_per_batch=batch,
                    outstanding_groups_limit=limit,
                    order=window if self.order == "window" else self.order,
                    on_deadline=self.on_deadline,
                )

    @property
    def outstanding_groups_max(self) -> int:
        """How many groups its policy may have at once, worked out apart from the policies."""
        batch = self.groups_per_batch
        batches: dict[str, float] = {"synchronous": 1, "one-step": 2, "unbounded": 3}
        batches |= {"over-sampling": 2, "tail-packing": 1.5}
        allowed = round(batches.get(self.policy, self.max_staleness + 1) * batch)
        is_limited = self.policy == "bounded" and self.outstanding_groups_limit is not None
        return min(allowed, self.outstanding_groups_limit or 1) if is_limited else allowed

    @property
    def staleness_bound(self) -> int | None:
        """What no trained token may exceed, worked out apart from the policies."""
        others = {"synchronous": 0, "one-step": 1, "unbounded": None, "over-sampling": None}
        others["tail-packing"] = 0
        if self.policy in others:
            return others[self.policy]
        if self.order == "window" and self.on_deadline == "wait":
            return self.max_staleness + 1 + (self.window_groups - 2) // self.groups_per_batch
        return self.max_staleness

    @property
    def is_in_order(self) -> bool:
        """Whether groups are trained in the order of admission."""
        if self.policy == "bounded":
            return self.order == "admission"
        return self.policy in ("synchronous", "one-step")


def draw_rules(plain: ScenarioRules) -> dict[str, object]:
    """What differs from the plainest rules, by the scenario's seed."""
    chance = random.Random(f"{plain.seed}/policy")
    others: tuple[PolicyName, ...] = (
        *("synchronous", "one-step", "unbounded", "over-sampling"),
        "tail-packing",
    )
    policy = chance.choice(others) if chance.random() < 0.2 else "bounded"
    orders: tuple[OrderName, ...] = ("admission", "completion", "completion", "window")
    order = chance.choice(orders)
    deadlines: tuple[OnDeadline, ...] = ("wait", "wait", "mask", "drop")
    if order == "admission":
        deadlines = ("wait",)
    if order == "completion":
        deadlines += ("split", "split")
    return {
        "policy": policy,
        "order": order,
        "window_groups": chance.randint(1, 2 * plain.groups_per_batch + 1),
        "on_deadline": chance.choice(deadlines),
        "filters_groups": plain.group_size > 1 and chance.random() < 0.2,
        "decide_after": chance.choice((None, 2)),
        "placement": chance.choice(("plain", "plain", "plain", *get_args(PlacementName))),
        "update_wave": chance.choice((None, None, 1, 2)),
        "publish_wait": chance.choice(("live", "live", "staged", "none")),
        "pausing": chance.choice((0.0, 0.0, 0.0, 0.3)),
    }
