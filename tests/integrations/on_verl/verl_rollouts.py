"""verl's rollout side without its trainer: replicas, manager, TransferQueue and replay buffer.

:class:`Trainer` stands in for verl's actor worker, so that tests hold the weights. The rest is
verl's own, made and called as its ``PPOTrainer`` does.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "tidegate.integrations.verl")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
import torch
import transfer_queue as tq
import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM
from verl.experimental.reward_loop import RewardLoopManager
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import LLMServerManager

from examples.verl_grpo import small_lines, tidegate_lines

GROUP_SIZE, GROUPS_PER_BATCH = 4, 2

QUESTIONS = ("1+1=", "2+2=", "3*4=", "9-5=")


def verl_config(model: Path, reward: Path, *overrides: str) -> DictConfig:
    """Return verl's own PPO configuration with the example's lines, and smaller batches."""
    lines = [
        *tidegate_lines(),
        *small_lines(model, reward),
        f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
        f"data.train_batch_size={GROUPS_PER_BATCH}",
        *overrides,
    ]
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(config_dir=folder, version_base=None):
        config: DictConfig = compose(config_name="ppo_trainer", overrides=lines)
    OmegaConf.resolve(config)
    return config


class Trainer(Worker):
    """Stands in for verl's ``ActorRolloutRefWorker``."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__()
        rollout = omega_conf_to_dataclass(config.rollout)
        model_config = omega_conf_to_dataclass(config.model)
        self.model = AutoModelForCausalLM.from_pretrained(
            model_config.local_path, dtype=torch.float32
        )
        adapter = get_rollout_class(rollout.name, rollout.mode)
        self.rollout = adapter(config=rollout, model_config=model_config, device_mesh=None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, noise: float) -> None:
        """Add noise to all weights."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(noise * torch.randn_like(parameter))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None:
        """Send the weights as verl's worker does for the ``naive`` checkpoint engine."""
        await self.rollout.resume(tags=["weights"])
        weights = ((name, tensor) for name, tensor in self.model.state_dict().items())
        await self.rollout.update_weights(
            weights, peft_config=None, base_sync_done=True, global_steps=global_steps
        )
        await self.rollout.resume(tags=["kv_cache"])


class Rollouts:
    """What verl's ``PPOTrainer`` has for rollouts, made as it makes them."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        tq.init(config.transfer_queue)
        self.trainer = RayWorkerGroup(
            resource_pool=RayResourcePool([1], use_gpu=False, max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(
                cls=ray.remote(Trainer), config=config.actor_rollout_ref
            ),
        )
        rewards = RewardLoopManager(config)
        self.servers = LLMServerManager.create(config, worker_group=self.trainer)
        self.client = self.servers.get_client()
        manager = config.actor_rollout_ref.rollout.agent.agent_loop_manager_class
        self.manager = load_class_from_fqn(manager, "AgentLoopManager").create(
            config=config,
            llm_client=self.client,
            teacher_client=None,
            reward_loop_worker_handles=rewards.reward_loop_worker_handles,
        )
        self.buffer = ReplayBufferAsync(
            "colocate_async", config.trainer.v1.colocate_async, None, "drop", {}, poll_interval=0.1
        )

    def submit(self, questions: list[str], step: int, *, validate: bool = False) -> list[str]:
        """Submit prompts as ``PPOTrainer._submit_batch_to_rollout`` does; return their ids."""
        uids = [str(uuid.uuid4()) for _ in questions]
        rows: dict[str, list[Any]] = {
            "raw_prompt": [[{"role": "user", "content": each}] for each in questions],
            "uid": uids,
            "index": [0] * len(questions),
            "data_source": ["ones"] * len(questions),
            "reward_model": [{"style": "rule", "ground_truth": "1"} for _ in questions],
            "extra_info": [{} for _ in questions],
        }
        batch = tensordict_utils.get_tensordict({k: _objects(v) for k, v in rows.items()})
        tensordict_utils.assign_non_tensor_data(batch, "global_steps", step)
        if validate:
            tensordict_utils.assign_non_tensor_data(batch, "validate", True)
        tag = {"is_prompt": True, "status": "pending", "global_steps": step}
        partition = "val" if validate else "train"
        tq.kv_batch_put(keys=uids, partition_id=partition, tags=[tag] * len(questions))
        self.manager.generate_sequences(batch)
        return uids

    def close(self) -> None:
        """End the replicas' runs and TransferQueue."""
        ray.get([server.shutdown.remote() for server in self.servers.server_handles])
        tq.close()


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Start Ray on this machine."""
    ray.init(num_cpus=6, include_dashboard=False, object_store_memory=200 * 2**20)
    try:
        yield
    finally:
        ray.shutdown()


def _objects(values: list[Any]) -> "np.ndarray[Any, Any]":
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
