"""Plug-in for verl: registers Tidegate's rollout replica and server adapter under ``tidegate``.

verl imports it in each process for ``VERL_USE_EXTERNAL_MODULES=tidegate.integrations.verl``;
``rollout.name=tidegate`` then selects it. :class:`Manager` is a further choice, as
``rollout.agent.agent_loop_manager_class``. See docs/verl.md.
"""

from typing import TYPE_CHECKING

try:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry
except ImportError as error:
    raise ImportError(
        f"tidegate.integrations.verl needs verl 0.9.1 ({error}); run pip install verl==0.9.1"
    ) from error

if TYPE_CHECKING:
    from tidegate.integrations.verl.manager import Manager
    from tidegate.integrations.verl.replica import TidegateReplica

__all__ = ["Manager"]


def _load_replica() -> "type[TidegateReplica]":
    from tidegate.integrations.verl.replica import TidegateReplica

    return TidegateReplica


RolloutReplicaRegistry.register("tidegate", _load_replica)
_ROLLOUT_REGISTRY["tidegate", "async"] = "tidegate.integrations.verl.server_adapter.ServerAdapter"


def __getattr__(name: str) -> object:
    # Lazily, because verl is only half imported when it imports this module.
    if name == "Manager":
        from tidegate.integrations.verl.manager import Manager

        return Manager
    raise AttributeError(f"module 'tidegate.integrations.verl' has no attribute {name!r}")
