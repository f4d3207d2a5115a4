"""Asynchronous rollouts for reinforcement learning on language models, with hard staleness bounds.

    async with tidegate.serve(model=path, engines=2, max_staleness=2) as rollouts:
        async for batch in rollouts.batches(tasks, episode=solve):
            train_step(batch)
            await rollouts.publish(model.state_dict())

Public names are imported lazily (PEP 562): importing ``tidegate`` does not import torch, an engine
process never loads the orchestrator, and the orchestrator never loads an engine.
"""

import ast
import functools
import importlib
import importlib.metadata
import logging
from pathlib import Path
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
    from tidegate.orchestrator.trainer.dataset import RolloutDataset
    from tidegate.orchestrator.trainer.handle import Evaluation
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
    from tidegate.orchestrator.weight_sync.state_dict import LocalShard
    from tidegate.policies.asynchrony import BoundedStaleness, OneStepOffPolicy, Unbounded
    from tidegate.policies.consumption import Window
    from tidegate.policies.elasticity import Elastic
    from tidegate.policies.failures import FailurePolicy
    from tidegate.policies.filters import DynamicSampling
    from tidegate.policies.kept_tokens import kept_logprobs
    from tidegate.policies.rounds import OverSampling, Synchronous, TailPacking
    from tidegate.policies.routing_replay import record_routed_experts, replay_routed_experts
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

__all__ = [  # noqa: RUF022 - in the order in which a reader needs them; so is the reference
    # Start a run, and train on it
    "serve",
    "serve_sync",
    "Rollouts",
    "SyncRollouts",
    "Batch",
    "PackedBatch",
    "RolloutDataset",
    "Curriculum",
    "TaskStatistics",
    "HardTaskReplay",
    "RunStatistics",
    "Stuck",
    "Evaluation",
    # Write episodes
    "Episode",
    "GeneratedTurn",
    "SamplingOptions",
    "LogitsProcessor",
    "Tools",
    "PolicyFailed",
    "InfrastructureFailed",
    "TidegateError",
    # Choose how stale tokens may be, and which groups are trained
    "BoundedStaleness",
    "Window",
    "OneStepOffPolicy",
    "Synchronous",
    "OverSampling",
    "TailPacking",
    "Unbounded",
    "DynamicSampling",
    "FailurePolicy",
    # Choose how many engines there are
    "Elastic",
    # Run environments and programs
    "EnvironmentPool",
    "environment_episode",
    "Environment",
    "Observation",
    "Sandboxes",
    "SandboxLimits",
    "Sandbox",
    "ProgramResult",
    "Bubblewrap",
    "Containers",
    "E2BSandboxes",
    "ModalSandboxes",
    "DaytonaSandboxes",
    # Compute what the loss needs
    "score_server",
    "score_server_sync",
    "Scorer",
    "SyncScorer",
    "TokenScores",
    "Readout",
    "kept_logprobs",
    "record_routed_experts",
    "replay_routed_experts",
    # Train adapters beside the run's weights
    "AdapterTrainer",
    "SyncAdapterTrainer",
    # Train in other processes
    "listen",
    "connect",
    "connect_sync",
    "RemoteRollouts",
    "SyncRemoteRollouts",
    "LocalShard",
    "train_on_ray",
    "ray_workers",
    "RayResources",
    # Serve HTTP
    "Gateway",
    "Endpoint",
    "vllm_server",
    "VLLMServer",
    "tinker_server",
    "TinkerServer",
    # Use another trainer
    "trl_rollout_func",
    "TRLRollouts",
    "RolloutWorker",
    # Watch a run, and read its records
    "log_as_json",
    "WandB",
    "MLflow",
    "TensorBoard",
    "open_run",
    "RecordedRun",
    "write_report",
    # Give settings by component
    "RunSettings",
    "StalenessSettings",
    "PlacementSettings",
    "SamplingSettings",
    "EpisodeSettings",
    "FleetSettings",
    "EngineSettings",
    "WeightSettings",
    "RecordSettings",
]


@functools.cache
def _homes() -> dict[str, str]:
    """Return the module of each public name: the imports above, which only type checkers run."""
    return {
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in __all__
    }


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.metadata.version("tidegate")
    if name not in __all__:
        raise AttributeError(f"module 'tidegate' has no attribute {name!r}")
    return getattr(importlib.import_module(_homes()[name]), name)
