"""Rank of a sharded trainer: ``python -m tests.sharded_trainer ADDRESS MODEL RANK MEETING JSON``.

Two ranks hold each tensor as a DTensor on a gloo mesh, or their parts of Megatron-core's layout,
and publish their own shards. A rank prints a line of JSON per publish.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import tidegate
from tests.megatron_layout import Sizes, megatron_state
from tests.remote_trainer import say
from tidegate.integrations.megatron import hugging_face_parts

WORLD_SIZE = 2
DENSE = 1.0
SPARSE = 0.02


def whole_state(model: Path, shares: list[float]) -> dict[str, torch.Tensor]:
    """Return the model's tensors after steps that each change this share of their elements."""
    noise = torch.Generator().manual_seed(0)
    state = load_file(model / "model.safetensors")
    for share in shares:
        for tensor in state.values():
            chosen = torch.rand(tensor.shape, generator=noise) < share
            steps = torch.randint(-20, 20, tensor.shape, generator=noise, dtype=torch.int16)
            tensor.view(torch.int16)[chosen] += steps[chosen]
    return state


def placement(name: str, tensor: torch.Tensor) -> Placement:
    """Return rows for most matrices, columns for some, as tensor parallelism does; norms whole."""
    if tensor.ndim < 2:
        return Replicate()
    return Shard(1) if "down_proj" in name or "o_proj" in name else Shard(0)


def sharded(state: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    shards = {n: distribute_tensor(t, mesh, [placement(n, t)]) for n, t in state.items()}
    plain = "model.norm.weight"
    return {**shards, plain: state[plain]}


def main(address: str, model: Path, rank: int, meeting: str, options: dict[str, Any]) -> None:
    """Publish after each batch."""
    sizes = Sizes(**options["megatron"]) if "megatron" in options else None
    config = transformers.AutoConfig.from_pretrained(model)
    if sizes is None:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD_SIZE
        )
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    shares: list[float] = []
    connection = tidegate.connect_sync(
        address, rank=rank, world_size=WORLD_SIZE, curve_key_directory=options.get("keys")
    )
    with connection as rollouts:
        weights = rollouts._handle._weights
        weights.reads_shared_memory &= options["shares_memory"]
        batches = rollouts.batches()
        for share in options["shares"]:
            next(batches)
            shares.append(share)
            whole = whole_state(model, shares)
            if sizes is None:
                version = rollouts.publish(sharded(whole, mesh), sharded=True)
            else:
                place = sizes.ranks(rank, config.num_hidden_layers)
                own = megatron_state(whole, config, sizes, rank)
                version = rollouts.publish(hugging_face_parts(own, config, place), sharded=True)
            say(version=version, wrote=weights._writes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, address, model, rank, meeting, options = sys.argv
    main(address, Path(model), int(rank), meeting, json.loads(options))
