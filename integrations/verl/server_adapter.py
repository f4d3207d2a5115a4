"""Server adapter of verl: hands a trainer worker's weights to the replica's run.

verl makes one in each trainer worker (hybrid mode), or in each ``CheckpointEngineWorker``
(standalone mode), and calls it after each step. Weights go through the replica's actor, as Ray
objects.
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch.distributed.device_mesh import DeviceMesh
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from tidegate.errors import ConfigError
from tidegate.integrations.verl.replica import server_name

if TYPE_CHECKING:
    from tidegate.integrations.verl.replica import SentTensor
    from tidegate.transport.sleep_messages import MemoryTag


class ServerAdapter(BaseRollout):
    """Client of this worker's replica. Replica and worker have the same rank, because a replica has
    one worker."""

    is_leader_rank = True

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        device_mesh: DeviceMesh | None,
        replica_rank: int = -1,
    ) -> None:
        """``replica_rank`` -1 is this worker's rank, as in hybrid mode."""
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank

    @property
    def _server(self) -> Any:
        """The replica's actor, which starts after this object is made."""
        return ray.get_actor(server_name(self.replica_rank))

    async def resume(self, tags: "list[MemoryTag]") -> None:
        """Have engines allocate memory again."""
        await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Have engines release the memory of weights and KV cache."""
        await self._server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: object = None,
        **_: object,
    ) -> None:
        """Publish whole tensors, by their names in the model, as the weights of a global step.

        They travel in buckets of ``checkpoint_engine.update_weights_bucket_megabytes`` through the
        memory that Ray shares between the processes of a node.

        Raises:
            ConfigError: they are deltas, or a LoRA adapter's.
            WeightsRefused: they do not fit the model; the old ones stay live.
        """
        if wire_format != "named_tensors":
            raise ConfigError(
                f"rollout.name=tidegate takes whole tensors, and the checkpoint engine sends "
                f"{wire_format!r}: choose another rollout.checkpoint_engine.backend than "
                f"delta_sharded, such as nccl"
            )
        if peft_config is not None:
            raise ConfigError(
                "rollout.name=tidegate takes merged weights, and verl sends a LoRA adapter: set "
                "actor_rollout_ref.model.lora.merge=True"
            )
        bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        server = self._server
        bucket: dict[str, SentTensor] = {}
        size_bytes = 0
        async for name, tensor in ensure_async_iterator(weights):
            if size_bytes + tensor.nbytes > bucket_bytes and bucket:
                await server.receive_weights.remote(bucket)
                bucket, size_bytes = {}, 0
            bucket[name] = _sent(tensor)
            size_bytes += tensor.nbytes
        await server.receive_weights.remote(bucket)
        await server.publish_weights.remote(global_steps)


def _sent(tensor: torch.Tensor) -> "SentTensor":
    """Return a tensor's copy on the host, as it travels."""
    content = tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content
