"""Weights sharded over two ranks are published whole."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.wire

RANK = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from tidegate.orchestrator.weight_sync.state_dict import named_buffers
from tidegate.orchestrator.weight_sync.state_dict import take_part

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole = {
    "rows": torch.arange(12.0).view(4, 3),
    "columns": torch.arange(10.0).view(2, 5),
    "uneven": torch.arange(7, dtype=torch.bfloat16),
    "everywhere": torch.arange(3.0),
    "one": torch.arange(1.0),
}
places = {"columns": Shard(1), "everywhere": Replicate()}
state = {n: distribute_tensor(t, mesh, [places.get(n, Shard(0))]) for n, t in whole.items()}
state["tied"] = state["rows"]
state["plain"] = torch.arange(2.0)
if rank:
    take_part(state)
else:
    sent = {buffer.name: buffer for buffer in named_buffers(state)}
    assert list(sent) == [*whole, "plain"], list(sent)
    for name, tensor in whole.items():
        assert sent[name].shape == tuple(tensor.shape), name
        assert bytes(sent[name].data) == bytes(tensor.view(torch.uint8).numpy().data), name
dist.barrier()
dist.destroy_process_group()
"""


def test_the_rank_that_publishes_has_each_tensor_whole_and_tied_ones_once() -> None:
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), str(Path(directory) / "meeting")],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            said = rank.communicate(timeout=120)[1]
            assert rank.returncode == 0, said
