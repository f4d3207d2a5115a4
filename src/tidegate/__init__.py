"""Asynchronous rollouts for reinforcement learning on language models, with hard staleness bounds.

    async with tidegate.serve(model=path, engines=2, max_staleness=2) as rollouts:
        async for batch in rollouts.batches(tasks, episode=solve):
            train_step(batch)
            await rollouts.publish(model.state_dict())

Public names are imported lazily (PEP 562): importing ``tidegate`` does not import torch, an engine
process never loads the orchestrator, and the orchestrator never loads an engine.
"""

import importlib
import importlib.metadata
import logging
from typing import TYPE_CHECKING

from tidegate.transport.printable import EscapeControls

if TYPE_CHECKING:
    from tidegate.environments.environment import Environment, Observation
    from tidegate.environments.environment_episode import environment_episode
    from tidegate.environments.local_sandboxes import Bubblewrap, Containers
    from tidegate.environments.pool import EnvironmentPool
    from tidegate.environments.remote_sandboxes import (
        DaytonaSandboxes,
        E2BSandboxes,
        ModalSandboxes,
    )
    from tidegate.environments.sandboxes import ProgramResult, Sandbox, Sandboxes, SandboxLimits
    from tidegate.environments.tools import Tools
    from tidegate.errors import InfrastructureFailed, PolicyFailed, TidegateError
    from tidegate.integrations.ray.ray_environments import ray_workers
    from tidegate.integrations.ray.ray_resources import RayResources
    from tidegate.integrations.ray.ray_trainers import train_on_ray
    from tidegate.integrations.rollout_worker import RolloutWorker
    from tidegate.integrations.trl_rollout_func import trl_rollout_func
    from tidegate.integrations.trl_rollouts import TRLRollouts
    from tidegate.observability.logs import log_as_json
    from tidegate.observability.recorded_run import RecordedRun, open_run
    from tidegate.observability.reports.report import write_report
    from tidegate.observability.trackers import MLflow, TensorBoard, WandB
    from tidegate.orchestrator.batches.batches import Batch, PackedBatch
    from tidegate.orchestrator.batches.curriculum import Curriculum
    from tidegate.orchestrator.core.task_records import TaskStatistics
    from tidegate.orchestrator.episodes.episode import Episode
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
    from tidegate.orchestrator.episodes.sampling_options import SamplingOptions
    from tidegate.orchestrator.fleet.scores import Readout, TokenScores
    from tidegate.orchestrator.settings.config import (
        EngineSettings,
        EpisodeSettings,
        FleetSettings,
        PlacementSettings,
        RecordSettings,
        RunSettings,
        SamplingSettings,
        StalenessSettings,
        WeightSettings,
    )
    from tidegate.orchestrator.telemetry.statistics import RunStatistics
    from tidegate.orchestrator.telemetry.watchdog import Stuck
    from tidegate.orchestrator.trainer.adapters import AdapterTrainer, SyncAdapterTrainer
    from tidegate.orchestrator.trainer.batch_handle import Evaluation
    from tidegate.orchestrator.trainer.dataset import RolloutDataset
    from tidegate.orchestrator.trainer.remote.listener import listen
    from tidegate.orchestrator.trainer.remote.rollouts import (
        RemoteRollouts,
        SyncRemoteRollouts,
        connect,
        connect_sync,
    )
    from tidegate.orchestrator.trainer.rollouts import (
        Rollouts,
        Scorer,
        SyncRollouts,
        SyncScorer,
    )
    from tidegate.policies.adaptive import AdaptiveStaleness
    from tidegate.policies.asynchrony import BoundedStaleness, OneStepOffPolicy, Unbounded
    from tidegate.policies.consumption import Window
    from tidegate.policies.failures import EpisodeFailure, FailureCause, FailurePolicy
    from tidegate.policies.filters import DynamicSampling, GroupFilter
    from tidegate.policies.kept_tokens import kept_logprobs
    from tidegate.policies.rounds import OverSampling, Synchronous, TailPacking
    from tidegate.policies.routing_replay import record_routed_experts, replay_routed_experts
    from tidegate.policies.staleness import StalenessPolicy
    from tidegate.policies.task_sampling import HardTaskReplay
    from tidegate.runs import (
        score_server,
        score_server_sync,
        serve,
        serve_sync,
        tinker_server,
        vllm_server,
    )
    from tidegate.serving.gateway.gateway import Endpoint, Gateway
    from tidegate.serving.tinker.server import TinkerServer
    from tidegate.serving.vllm_server import VLLMServer
    from tidegate.transport.sampling import LogitsProcessor

    __version__: str

logging.getLogger("tidegate").addFilter(EscapeControls())

__all__ = [
    "AdapterTrainer",
    "AdaptiveStaleness",
    "Batch",
    "BoundedStaleness",
    "Bubblewrap",
    "Containers",
    "Curriculum",
    "DaytonaSandboxes",
    "DynamicSampling",
    "E2BSandboxes",
    "Endpoint",
    "EngineSettings",
    "Environment",
    "EnvironmentPool",
    "Episode",
    "EpisodeFailure",
    "EpisodeSettings",
    "Evaluation",
    "FailureCause",
    "FailurePolicy",
    "FleetSettings",
    "Gateway",
    "GeneratedTurn",
    "GroupFilter",
    "HardTaskReplay",
    "InfrastructureFailed",
    "LogitsProcessor",
    "MLflow",
    "ModalSandboxes",
    "Observation",
    "OneStepOffPolicy",
    "OverSampling",
    "PackedBatch",
    "PlacementSettings",
    "PolicyFailed",
    "ProgramResult",
    "RayResources",
    "Readout",
    "RecordSettings",
    "RecordedRun",
    "RemoteRollouts",
    "RolloutDataset",
    "RolloutWorker",
    "Rollouts",
    "RunSettings",
    "RunStatistics",
    "SamplingOptions",
    "SamplingSettings",
    "Sandbox",
    "SandboxLimits",
    "Sandboxes",
    "Scorer",
    "StalenessPolicy",
    "StalenessSettings",
    "Stuck",
    "SyncAdapterTrainer",
    "SyncRemoteRollouts",
    "SyncRollouts",
    "SyncScorer",
    "Synchronous",
    "TRLRollouts",
    "TailPacking",
    "TaskStatistics",
    "TensorBoard",
    "TidegateError",
    "TinkerServer",
    "TokenScores",
    "Tools",
    "Unbounded",
    "VLLMServer",
    "WandB",
    "WeightSettings",
    "Window",
    "connect",
    "connect_sync",
    "environment_episode",
    "kept_logprobs",
    "listen",
    "log_as_json",
    "open_run",
    "ray_workers",
    "record_routed_experts",
    "replay_routed_experts",
    "score_server",
    "score_server_sync",
    "serve",
    "serve_sync",
    "tinker_server",
    "train_on_ray",
    "trl_rollout_func",
    "vllm_server",
    "write_report",
]

_HOMES = {
    "AdaptiveStaleness": "policies.adaptive",
    "Batch": "orchestrator.batches.batches",
    "BoundedStaleness": "policies.asynchrony",
    "Bubblewrap": "environments.local_sandboxes",
    "Containers": "environments.local_sandboxes",
    "DaytonaSandboxes": "environments.remote_sandboxes",
    "E2BSandboxes": "environments.remote_sandboxes",
    "ModalSandboxes": "environments.remote_sandboxes",
    "ProgramResult": "environments.sandboxes",
    "Sandbox": "environments.sandboxes",
    "SandboxLimits": "environments.sandboxes",
    "Sandboxes": "environments.sandboxes",
    "Curriculum": "orchestrator.batches.curriculum",
    "DynamicSampling": "policies.filters",
    "Environment": "environments.environment",
    "EnvironmentPool": "environments.pool",
    "EngineSettings": "orchestrator.settings.config",
    "Endpoint": "serving.gateway.gateway",
    "Episode": "orchestrator.episodes.episode",
    "EpisodeSettings": "orchestrator.settings.config",
    "EpisodeFailure": "policies.failures",
    "AdapterTrainer": "orchestrator.trainer.adapters",
    "Evaluation": "orchestrator.trainer.batch_handle",
    "FailureCause": "policies.failures",
    "FailurePolicy": "policies.failures",
    "FleetSettings": "orchestrator.settings.config",
    "Gateway": "serving.gateway.gateway",
    "GeneratedTurn": "orchestrator.episodes.generated_turn",
    "GroupFilter": "policies.filters",
    "HardTaskReplay": "policies.task_sampling",
    "Observation": "environments.environment",
    "OneStepOffPolicy": "policies.asynchrony",
    "OverSampling": "policies.rounds",
    "PackedBatch": "orchestrator.batches.batches",
    "PlacementSettings": "orchestrator.settings.config",
    "LogitsProcessor": "transport.sampling",
    "RayResources": "integrations.ray.ray_resources",
    "Readout": "orchestrator.fleet.scores",
    "RecordedRun": "observability.recorded_run",
    "RecordSettings": "orchestrator.settings.config",
    "RemoteRollouts": "orchestrator.trainer.remote.rollouts",
    "RolloutDataset": "orchestrator.trainer.dataset",
    "RolloutWorker": "integrations.rollout_worker",
    "Rollouts": "orchestrator.trainer.rollouts",
    "RunSettings": "orchestrator.settings.config",
    "RunStatistics": "orchestrator.telemetry.statistics",
    "SamplingOptions": "orchestrator.episodes.sampling_options",
    "SamplingSettings": "orchestrator.settings.config",
    "Scorer": "orchestrator.trainer.rollouts",
    "StalenessPolicy": "policies.staleness",
    "StalenessSettings": "orchestrator.settings.config",
    "Stuck": "orchestrator.telemetry.watchdog",
    "SyncRemoteRollouts": "orchestrator.trainer.remote.rollouts",
    "SyncAdapterTrainer": "orchestrator.trainer.adapters",
    "SyncRollouts": "orchestrator.trainer.rollouts",
    "SyncScorer": "orchestrator.trainer.rollouts",
    "Synchronous": "policies.rounds",
    "TRLRollouts": "integrations.trl_rollouts",
    "TailPacking": "policies.rounds",
    "TaskStatistics": "orchestrator.core.task_records",
    "MLflow": "observability.trackers",
    "TensorBoard": "observability.trackers",
    "TidegateError": "errors",
    "PolicyFailed": "errors",
    "InfrastructureFailed": "errors",
    "TinkerServer": "serving.tinker.server",
    "TokenScores": "orchestrator.fleet.scores",
    "Tools": "environments.tools",
    "Unbounded": "policies.asynchrony",
    "VLLMServer": "serving.vllm_server",
    "WandB": "observability.trackers",
    "WeightSettings": "orchestrator.settings.config",
    "Window": "policies.consumption",
    "connect": "orchestrator.trainer.remote.rollouts",
    "connect_sync": "orchestrator.trainer.remote.rollouts",
    "environment_episode": "environments.environment_episode",
    "kept_logprobs": "policies.kept_tokens",
    "log_as_json": "observability.logs",
    "score_server": "runs",
    "score_server_sync": "runs",
    "listen": "orchestrator.trainer.remote.listener",
    "ray_workers": "integrations.ray.ray_environments",
    "record_routed_experts": "policies.routing_replay",
    "replay_routed_experts": "policies.routing_replay",
    "serve": "runs",
    "serve_sync": "runs",
    "tinker_server": "runs",
    "vllm_server": "runs",
    "open_run": "observability.recorded_run",
    "write_report": "observability.reports.report",
    "train_on_ray": "integrations.ray.ray_trainers",
    "trl_rollout_func": "integrations.trl_rollout_func",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.metadata.version("tidegate")
    if name not in _HOMES:
        raise AttributeError(f"module 'tidegate' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tidegate.{_HOMES[name]}"), name)
