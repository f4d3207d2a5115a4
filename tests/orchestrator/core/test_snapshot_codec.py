"""Every attribute of a core and its parts is saved, or known not to be needed after a crash."""

from dataclasses import fields

import pytest

from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.hand_over import HandedBatch, HandOvers
from tidegate.orchestrator.core.ledger import Ledger
from tidegate.orchestrator.core.placement import EngineTurns
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.core.snapshot_codec import (
    Saved,
    SavedBatch,
    SavedCore,
    SavedEngine,
    SavedGroup,
    SavedLedger,
    SavedReuse,
    SavedRollout,
    SavedTasks,
    SavedTurn,
    SavedTurns,
    record,
)
from tidegate.orchestrator.core.taken_tasks import TakenTasks
from tidegate.policies.rounds import Synchronous

CORE = Core(Rules(policy=Synchronous(groups_per_batch=1), group_size=1))


@pytest.mark.parametrize(
    ("kind", "attributes", "not_saved"),
    [
        (
            SavedTurn,
            Turn.__slots__,
            # Deferred tokens are settled first. An engine's submissions have place, priority and
            # tokens before. All others follow from the rollout, or from the engine's next step.
            "rollout rollout_id number filed_token_ids filed_logprobs deferred_tokens place "
            "priority sampled_before sampled_by is_evaluation",
        ),
        (
            SavedRollout,
            Rollout.__struct_fields__,
            # agents and branches are the other ends of home and branch_of. A use is saved beside
            # the group that it is of.
            "adapter agents began_s branches ended_s filed_logprobs filed_token_ids group_id "
            "may_have_media use",
        ),
        (SavedGroup, Group.__struct_fields__, "task is_evaluation agents"),
        (SavedEngine, [each.name for each in fields(EngineTurns)], "filing"),
        (SavedBatch, [each.name for each in fields(HandedBatch)], ""),
        (SavedLedger, Ledger.__slots__, ""),
        (SavedTasks, vars(TakenTasks()), "dropped"),
        (SavedReuse, vars(HandOvers(is_kept=True)), "holding kept is_kept _max_uses"),
        (
            SavedTurns,
            vars(CORE.turns),
            "placement is_served adapters adapter_versions halted on_tokens_removed _suspect "
            "_oldest",
        ),
        (
            SavedCore,
            vars(CORE),
            "rules adapter base policy versions handed trained policy_classes _survives_crashes "
            "_failed_selection",
        ),
    ],
)
def test_an_attribute_is_saved_or_is_listed_as_not_needed(
    kind: type[Saved], attributes: list[str], not_saved: str
) -> None:
    assert set(attributes) - set(kind.__struct_fields__) == set(not_saved.split())


def test_a_record_is_read_from_an_object_and_sets_an_object() -> None:
    ledger, restored = Ledger(), Ledger()
    ledger.sample(5)
    ledger.finish(2)
    saved = record(SavedLedger)(ledger, discarded={})
    assert saved == SavedLedger(5, 3, 2, 0, {})
    saved.restore(restored)
    assert restored.snapshot() == ledger.snapshot()
    with pytest.raises(TypeError, match="discarded"):
        record(SavedLedger)(ledger)
