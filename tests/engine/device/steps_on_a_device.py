"""Checks without a GPU that steps stay on their device, and counts kernel launches and variants.

Run by ``test_device_discipline.py`` as ``python -m tests.engine.device.steps_on_a_device``, without
``TRITON_INTERPRET``. Runs forward passes, draws and scores on fake tensors that have a device and
no data: torch refuses an operation with operands on two devices. Prints one JSON object per kernel:
the launches, and how many variants Triton would compile. With ``compile`` it compiles them for an
H100.
"""

import json
import sys
from collections import defaultdict
from typing import Any

import numpy as np
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.kernels.compile_kernels import TARGETS, constants_of, print_compiled
from tidegate.engine.device.plan import DTYPES, HostPlanner
from tidegate.engine.device.runner import (
    LayerAttention,
    device_forward,
    launch_scores,
    rule_of,
)
from tidegate.engine.device.sampling import HostDraw
from tidegate.engine.device.weights import DeviceWeights
from tidegate.engine.execution.runner import Row
from tidegate.engine.models.model import head_logits
from tidegate.engine.models.model_config import AttentionKind, LayerShape, ModelConfig
from tidegate.engine.models.rope_config import Rope
from tidegate.engine.sampling.sampling import RowSampling
from tidegate.engine.sampling.scoring import RowScoring

DEVICE = torch.device("meta")
"""Stands for cuda, because a torch build without CUDA cannot index even a fake CUDA tensor."""

ROPE = Rope(theta=10_000.0)
BLOCK_TOKENS = 16

QWEN3 = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    layers=(LayerShape(attention=AttentionKind(rope=ROPE)),) * 2,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    norm_epsilon=1e-6,
    context_tokens_max=40_960,
    tied_head=True,
    qk_norm=True,
)
GEMMA2 = ModelConfig(
    architecture="Gemma2ForCausalLM",
    vocab_size=256_000,
    hidden_size=2304,
    intermediate_size=9216,
    layers=tuple(
        LayerShape(attention=AttentionKind(rope=ROPE, window_tokens=w)) for w in (4096, None)
    ),
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    norm_epsilon=1e-6,
    context_tokens_max=8192,
    tied_head=True,
    activation="gelu_pytorch_tanh",
    norm_adds_one=True,
    post_norms=True,
    embedding_scale=48.0,
    attention_soft_cap=50.0,
    logits_soft_cap=30.0,
)

STEPS: list[list[tuple[int, int]]] = [
    [(0, 7)],
    [(40, 1)],
    *([(700 + 3 * n, 1)] * n for n in (1, 2, 3, 5, 16, 33, 64)),
    *([(2000 + n, 1)] * n for n in (1, 7, 32)),
    [(900, 1)] * 5 + [(0, 17), (64, 300)],
    [(0, 512), (0, 511), (0, 1)],
    [(3, 2), (5, 1), (0, 33)],
]
"""Per step and row: (tokens before the step, tokens of the step)."""


class Launches:
    """Records kernel launches in place of Triton."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = defaultdict(int)
        self.variants: dict[str, dict[str, Any]] = defaultdict(dict)
        """Per kernel, the arguments of each variant that Triton would compile."""

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """Stand-in for ``JITFunction.run`` that launches nothing."""
        options = {"num_warps": named.pop("num_warps", 4)}
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                assert isinstance(value, FakeTensor), name
                assert value.device == DEVICE, f"{kernel.__name__}: {name} is on {value.device}"
        assert all(side > 0 for side in grid), f"{kernel.__name__} has no programs: {grid}"
        self.counts[kernel.__name__] += 1
        self.variants[kernel.__name__].setdefault(_key(kernel, given), (kernel, given, options))


def _key(kernel: Any, given: dict[str, Any]) -> str:
    """Return the key by which Triton distinguishes compiled variants."""
    plain = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    multiples = [
        name
        for name, value in given.items()
        if type(value) is int and value % 16 == 0 and name not in plain
    ]
    types = [str(value.dtype) for value in given.values() if isinstance(value, torch.Tensor)]
    return json.dumps([constants_of(kernel, given), multiples, types], default=str)


def step(config: ModelConfig, dtype: torch.dtype, mode: FakeTensorMode) -> None:
    """Run all the steps of a model."""
    with mode, DEVICE:
        weights = DeviceWeights.allocate(config, dtype, is_packed=False)
        size = (4096, 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim)
        table = torch.empty(config.context_tokens_max, 2, config.head_dim, dtype=dtype)
        places = [
            LayerAttention(
                torch.empty(size, dtype=dtype), table, rule_of(config, kind.window_tokens)
            )
            for kind in (layer.attention for layer in config.layers)
        ]
    planner = HostPlanner(BLOCK_TOKENS)
    for sizes in STEPS:
        rows = [_row(n, *one) for n, one in enumerate(sizes)]
        host, draw = planner.plan(rows), HostDraw([row.sampling for row in rows if row.sampling])
        requested = [row.scoring for row in rows if row.scoring]
        if host.decode_rows:
            padded = host.padded(host.decode_rows + 3)
            with mode:
                plan = padded.on_device([_sent(array) for array in padded.arrays])
                assert len(device_forward(weights, places, plan)) == padded.decode_rows
        with mode:
            plan = host.on_device([_sent(array) for array in host.arrays])
            hidden = device_forward(weights, places, plan)
            assert hidden.device == DEVICE
            assert hidden.shape == (
                len(sizes) + sum(one.positions - 1 for one in requested),
                config.hidden_size,
            )
            sampled = len(draw.sampling)
            if sampled:
                logits = head_logits(weights, hidden[:sampled])
                pending = draw.launch(logits, [_sent(array) for array in draw.arrays])
                assert pending.token_ids.shape == pending.logprobs.shape == (sampled,)
            launch_scores(weights, hidden[sampled:], requested)


def _sent(array: Any) -> torch.Tensor:
    return torch.empty(array.shape, dtype=DTYPES[array.dtype], device=DEVICE)


def _row(number: int, start: int, count: int) -> Row:
    """Return a row; rows of two tokens are scored, all others sample."""
    tokens = np.zeros(count, np.int32)
    table = list(range(number, number + -(-(start + count) // BLOCK_TOKENS)))
    if count == 2:
        return Row(tokens, start, table, None, RowScoring(2, "logprobs", tokens))
    return Row(tokens, start, table, RowSampling(0.7, 20, 0.9, number, 0))


def main() -> None:
    """Run the steps of two models, and print their kernels."""
    launches = Launches()
    triton.JITFunction.run = lambda kernel, *args, **named: launches.run(kernel, *args, **named)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    models = [(QWEN3, torch.bfloat16)]
    if sys.argv[1:] != ["compile"]:
        models += [(GEMMA2, torch.bfloat16)]
    for config, dtype in models:
        step(config, dtype, mode)
    for name, variants in launches.variants.items():
        line = {"kernel": name, "launches": launches.counts[name], "variants": len(variants)}
        sys.stdout.write(json.dumps(line) + "\n")
        if sys.argv[1:] == ["compile"]:
            for kernel, given, options in variants.values():
                print_compiled(TARGETS["h100"], kernel, given, options)


if __name__ == "__main__":
    main()
