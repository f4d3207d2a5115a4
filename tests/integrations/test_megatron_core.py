"""The parts of Megatron-core's own ranks on a CPU, by what the joined model computes.

    make test-megatron

Tried with megatron-core 0.16.1, its local layers and gloo. TransformerEngine and CUDA were not.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.integrations.megatron_rank import TOKENS
from tests.megatron_layout import Sizes
from tests.models import make_model_directory
from tidegate.orchestrator.weight_sync.state_dict import LocalShard, own_parts, tensors_of
from tidegate.orchestrator.weight_sync.tensor_parts import joined

PACKAGES = os.environ.get("TIDEGATE_MEGATRON", "")

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(not PACKAGES, reason="TIDEGATE_MEGATRON must name megatron-core's folder"),
]


def run_ranks(directory: Path, sizes: Sizes) -> list[Any]:
    """Run all ranks as processes; return what they wrote."""
    path = os.pathsep.join([*sys.path, PACKAGES])
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.integrations.megatron_rank", str(directory)),
                *(str(rank), json.dumps(dataclasses.asdict(sizes))),
            ],
            env=os.environ | {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        )
        for rank in range(sizes.world)
    ]
    try:
        assert [process.wait(120) for process in processes] == [0] * sizes.world
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(directory / f"{rank}.pt") for rank in range(sizes.world)]


@pytest.mark.parametrize(
    ("architecture", "tied", "sizes"),
    [
        ("llama", True, Sizes()),
        ("qwen2", False, Sizes(tensor=2, expert_tensor=2)),
        ("qwen3", False, Sizes(tensor=4, expert_tensor=4)),  # two key-value heads
        ("llama", False, Sizes(tensor=2, pipeline=2, expert_tensor=2)),
        ("qwen3_moe", False, Sizes(tensor=2, expert=2)),
        ("qwen3_moe", False, Sizes(data=2, expert=2)),
        ("qwen3_moe", False, Sizes(tensor=2, data=2, expert=2, expert_tensor=2)),
    ],
    ids=["one", "tensor", "cut_heads", "pipeline", "experts", "expert_data", "expert_tensor"],
)
def test_the_model_that_ranks_parts_make_computes_the_ranks_own_logits(
    tmp_path: Path, architecture: str, tied: bool, sizes: Sizes
) -> None:
    directory = make_model_directory(tmp_path / "model", architecture, tied=tied, vocab_size=90)
    ranks = run_ranks(tmp_path, sizes)
    parts = []
    for rank, (saved, _, _) in enumerate(ranks):
        shards = {name: LocalShard(*each) for name, each in saved.items()}
        parts += own_parts(shards, rank=rank)
    state, file = tensors_of(joined(parts)), directory / "model.safetensors"
    assert {n: t.shape for n, t in load_file(file).items()} == {
        n: t.shape for n, t in state.items()
    }
    save_file(state, file, metadata={"format": "pt"})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        wanted = model.eval()(torch.tensor([TOKENS])).logits[0]
    own = {at: columns for _, at, columns in ranks if columns is not None}
    got = torch.cat([own[at] for at in sorted(own)], dim=-1)[:, :90]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
