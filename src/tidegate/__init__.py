"""Asynchronous rollouts for reinforcement learning on language models, with hard staleness bounds.

    async with tidegate.serve(model=path, engines=2, max_staleness=2) as rollouts:
        async for batch in rollouts.batches(tasks, episode=solve):
            train_step(batch)
            await rollouts.publish(model.state_dict())

Names are imported when first used: an engine never loads the orchestrator, nor the reverse, and
importing this package does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.errors import TidegateError
    from tidegate.orchestrator.client import Evaluation
    from tidegate.orchestrator.cluster.ray_places import RayPlaces
    from tidegate.orchestrator.cluster.ray_trainers import train_on_ray
    from tidegate.orchestrator.config import RunSettings
    from tidegate.orchestrator.environments.environment import Environment, Observation
    from tidegate.orchestrator.environments.environment_episode import environment_episode
    from tidegate.orchestrator.environments.pool import EnvironmentPool
    from tidegate.orchestrator.environments.tools import Tools
    from tidegate.orchestrator.episodes.episode import Episode
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
    from tidegate.orchestrator.episodes.sampling_options import SamplingOptions
    from tidegate.orchestrator.faces import Scorer, SyncScorer, score_server, score_server_sync
    from tidegate.orchestrator.feed.batches import Batch, PackedBatch
    from tidegate.orchestrator.feed.dataset import RolloutDataset
    from tidegate.orchestrator.fleet.scores import Readout, TokenScores
    from tidegate.orchestrator.gateway.gateway import Endpoint, Gateway
    from tidegate.orchestrator.observing.logs import log_as_json
    from tidegate.orchestrator.observing.tensorboard import TensorBoard
    from tidegate.orchestrator.remote.faces import (
        RemoteRollouts,
        SyncRemoteRollouts,
        connect,
        connect_sync,
    )
    from tidegate.orchestrator.rollout_worker import RolloutWorker
    from tidegate.orchestrator.serve import Rollouts, SyncRollouts, serve, serve_sync
    from tidegate.orchestrator.statistics import RunStatistics
    from tidegate.orchestrator.trl_rollouts import TRLRollouts
    from tidegate.orchestrator.vllm_server.server import VLLMServer
    from tidegate.orchestrator.watchdog import Stuck
    from tidegate.policies.adaptive import AdaptiveStaleness
    from tidegate.policies.asynchrony import BoundedStaleness, OneStepOffPolicy, Unbounded
    from tidegate.policies.consumption import Window
    from tidegate.policies.filters import DynamicSampling, GroupFilter
    from tidegate.policies.rounds import OverSampling, Synchronous, TailPacking
    from tidegate.policies.staleness import StalenessPolicy
    from tidegate.transport.sampling import Processor

__all__ = [
    "AdaptiveStaleness",
    "Batch",
    "BoundedStaleness",
    "DynamicSampling",
    "Endpoint",
    "Environment",
    "EnvironmentPool",
    "Episode",
    "Evaluation",
    "Gateway",
    "GeneratedTurn",
    "GroupFilter",
    "Observation",
    "OneStepOffPolicy",
    "OverSampling",
    "PackedBatch",
    "Processor",
    "RayPlaces",
    "Readout",
    "RemoteRollouts",
    "RolloutDataset",
    "RolloutWorker",
    "Rollouts",
    "RunSettings",
    "RunStatistics",
    "SamplingOptions",
    "Scorer",
    "StalenessPolicy",
    "Stuck",
    "SyncRemoteRollouts",
    "SyncRollouts",
    "SyncScorer",
    "Synchronous",
    "TRLRollouts",
    "TailPacking",
    "TensorBoard",
    "TidegateError",
    "TokenScores",
    "Tools",
    "Unbounded",
    "VLLMServer",
    "Window",
    "connect",
    "connect_sync",
    "environment_episode",
    "log_as_json",
    "score_server",
    "score_server_sync",
    "serve",
    "serve_sync",
    "train_on_ray",
]

_HOMES = {
    "AdaptiveStaleness": "policies.adaptive",
    "Batch": "orchestrator.feed.batches",
    "BoundedStaleness": "policies.asynchrony",
    "DynamicSampling": "policies.filters",
    "Environment": "orchestrator.environments.environment",
    "EnvironmentPool": "orchestrator.environments.pool",
    "Endpoint": "orchestrator.gateway.gateway",
    "Episode": "orchestrator.episodes.episode",
    "Evaluation": "orchestrator.client",
    "Gateway": "orchestrator.gateway.gateway",
    "GeneratedTurn": "orchestrator.episodes.generated_turn",
    "GroupFilter": "policies.filters",
    "Observation": "orchestrator.environments.environment",
    "OneStepOffPolicy": "policies.asynchrony",
    "OverSampling": "policies.rounds",
    "PackedBatch": "orchestrator.feed.batches",
    "Processor": "transport.sampling",
    "RayPlaces": "orchestrator.cluster.ray_places",
    "Readout": "orchestrator.fleet.scores",
    "RemoteRollouts": "orchestrator.remote.faces",
    "RolloutDataset": "orchestrator.feed.dataset",
    "RolloutWorker": "orchestrator.rollout_worker",
    "Rollouts": "orchestrator.serve",
    "RunSettings": "orchestrator.config",
    "RunStatistics": "orchestrator.statistics",
    "SamplingOptions": "orchestrator.episodes.sampling_options",
    "Scorer": "orchestrator.faces",
    "StalenessPolicy": "policies.staleness",
    "Stuck": "orchestrator.watchdog",
    "SyncRemoteRollouts": "orchestrator.remote.faces",
    "SyncRollouts": "orchestrator.serve",
    "SyncScorer": "orchestrator.faces",
    "Synchronous": "policies.rounds",
    "TRLRollouts": "orchestrator.trl_rollouts",
    "TailPacking": "policies.rounds",
    "TensorBoard": "orchestrator.observing.tensorboard",
    "TidegateError": "errors",
    "TokenScores": "orchestrator.fleet.scores",
    "Tools": "orchestrator.environments.tools",
    "Unbounded": "policies.asynchrony",
    "VLLMServer": "orchestrator.vllm_server.server",
    "Window": "policies.consumption",
    "connect": "orchestrator.remote.faces",
    "connect_sync": "orchestrator.remote.faces",
    "environment_episode": "orchestrator.environments.environment_episode",
    "log_as_json": "orchestrator.observing.logs",
    "score_server": "orchestrator.faces",
    "score_server_sync": "orchestrator.faces",
    "serve": "orchestrator.serve",
    "serve_sync": "orchestrator.serve",
    "train_on_ray": "orchestrator.cluster.ray_trainers",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tidegate' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tidegate.{_HOMES[name]}"), name)
