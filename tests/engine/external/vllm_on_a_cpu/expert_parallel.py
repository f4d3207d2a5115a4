"""What vLLM 0.32's CPU build lacks for expert parallelism over data-parallel ranks.

Without the collectives the first step of a mixture raises ``NotImplementedError``. Its kernel takes
the ids of the other ranks' experts for its own, and reads beyond its weights. Weights that are
loaded again are not packed for the kernel.

Put this directory on PYTHONPATH and start vLLM with ``--worker-extension-cls
expert_parallel.Extension``.
"""

from typing import Any

import torch
import torch.distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)


def all_gatherv(self: Any, tensors: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Concatenate the ranks' rows of each tensor; rank r has ``sizes[r]`` rows."""
    assert dim == 0
    if not isinstance(tensors, list):
        return all_gatherv(self, [tensors], dim, sizes)[0]
    counts = sizes or [len(tensors[0])] * self.world_size
    gathered = []
    for tensor in tensors:
        own = tensor.new_zeros(max(counts), *tensor.shape[1:])  # gloo gathers equal shapes only
        own[: len(tensor)] = tensor
        parts = [torch.empty_like(own) for _ in counts]
        torch.distributed.all_gather(parts, own, group=self.device_group)
        pairs = zip(parts, counts, strict=True)
        gathered.append(torch.cat([part[:count] for part, count in pairs]))
    return gathered


def reduce_scatterv(
    self: Any, tensor: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Sum the ranks' tensors and return this rank's rows; rank r gets ``sizes[r]``."""
    assert dim == 0
    counts = sizes or [len(tensor) // self.world_size] * self.world_size
    total = tensor.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    start = sum(counts[: self.rank_in_group])
    return total[start : start + counts[self.rank_in_group]].clone()


set_up: Any = UnquantizedFusedMoEMethod._setup_kernel


def set_up_packed(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
    """Pack the weights, also those of an update."""
    is_update = self.moe_kernel is not None
    set_up(self, layer=layer, w13=w13, w2=w2)
    if is_update:
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)


kernel: Any = CPUUnquantizedExperts.apply


def apply(
    self: Any,
    *,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    **rest: Any,
) -> None:
    """Compute this rank's experts; those of others get weight zero."""
    if expert_map is not None:
        local_ids = expert_map[topk_ids]
        topk_weights = topk_weights.masked_fill(local_ids < 0, 0.0)
        topk_ids = local_ids.clamp(min=0).to(topk_ids.dtype)
    kernel(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **rest)


CPUUnquantizedExperts.apply = apply
UnquantizedFusedMoEMethod._setup_kernel = set_up_packed
CpuCommunicator.all_gatherv = all_gatherv
CpuCommunicator.reduce_scatterv = reduce_scatterv


class Extension:
    """Has no methods; vLLM's workers import its module."""
