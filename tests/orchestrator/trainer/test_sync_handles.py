"""A sync handle has every public member of its async handle, with its arguments and docstring."""

import inspect
from typing import Any, assert_type

import pytest

import tidegate
from tidegate.orchestrator.trainer.adapters import (
    AdapterHandle,
    AdapterTrainer,
    SyncAdapterHandle,
    SyncAdapterTrainer,
)
from tidegate.orchestrator.trainer.remote.rollouts import RemoteRollouts, SyncRemoteRollouts
from tidegate.orchestrator.trainer.rollouts import Rollouts, Scorer, SyncRollouts, SyncScorer

ATTRIBUTES = {"settings", "name", "rank", "world_size"}
"""Members that the async handles set in their constructors."""


def members(handle: type) -> dict[str, Any]:
    """Return a handle's public members by name."""
    return {name: getattr(handle, name) for name in dir(handle) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("handle", "sync_handle"),
    [
        (Scorer, SyncScorer),
        (Rollouts, SyncRollouts),
        (AdapterHandle, SyncAdapterHandle),
        (AdapterTrainer, SyncAdapterTrainer),
        (RemoteRollouts, SyncRemoteRollouts),
    ],
)
def test_a_sync_handle_has_its_async_handles_methods_with_their_arguments(
    handle: type, sync_handle: type
) -> None:
    wanted, found = members(handle), members(sync_handle)
    assert found.keys() - ATTRIBUTES == wanted.keys()
    for name, method in wanted.items():
        assert found[name].__doc__, name
        if inspect.isfunction(method):
            parameters = inspect.signature(method).parameters
            assert inspect.signature(found[name]).parameters == parameters, name


def types_for_mypy(run: SyncRollouts, critic: SyncAdapterTrainer, rank: SyncRemoteRollouts) -> None:
    """Calls that mypy checks, those with ``type: ignore`` as errors. Nothing calls this."""
    assert_type(run.publish({}, batches=[1], wait="staged"), int)
    assert_type(run.next_batch(), tidegate.Batch | None)
    assert_type(run.statistics(), tidegate.RunStatistics)
    assert_type(critic.publish("directory", batches=[1]), int)
    assert_type(critic.pin(), int)
    assert_type(rank.publish(sharded=True), int)
    assert_type(rank.statistics(), tidegate.RunStatistics)
    run.publish({}, wait="never")  # type: ignore[arg-type]
    tidegate.serve(model="m", pause_mode="abort", devices=["cuda:0"], run_directory="run")
    tidegate.serve(model="m", pause_mode="stop")  # type: ignore[arg-type]
    tidegate.serve(model="m", max_stalenes=1)  # type: ignore[call-arg]
