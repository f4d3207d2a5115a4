"""Bytes and time of publishing patches of elements, after steps of Adam (`weight_deltas`).

Master weights are float32, published in bfloat16, as mixed-precision trainers do. Each tensor takes
ten steps of torch's AdamW to warm its moments up, and one more, whose change is published. Weights
are those of SmolLM2, and random ones of a larger model. Gradients are random: Adam's steps have the
size of the learning rate whatever the gradients' is. The engine's part is Tidegate's own staging
store, whose buffer is brought from the version before the live one to the next by two patches. The
peer is the whole set: its bytes, and the CPU time to load it from memory.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import zstandard
from safetensors.torch import load_file

from benchmarks.engine.shapes import SHAPES, make_directory
from benchmarks.table import Row, compared
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights
from tidegate.orchestrator.weight_sync.deltas import WrittenElements
from tidegate.orchestrator.weight_sync.state_dict import named_buffers
from tidegate.transport.messages import TensorSpec
from tidegate.transport.weight_channels import NamedBuffer
from tidegate.transport.weight_channels.patches import ElementPatch, decode_patch

LEARNING_RATES = (1e-6, 1e-5, 3e-4)
WARM_UP_STEPS = 10
REPEATS = 3

State = dict[str, torch.Tensor]


def step_of_adam(shapes: State, learning_rate: float) -> tuple[State, State]:
    """Return the published weights before and after one step of AdamW."""
    noise = torch.Generator().manual_seed(0)
    before: State = {}
    after: State = {}
    for name, like in shapes.items():
        master = torch.nn.Parameter(like.float())
        optimizer = torch.optim.AdamW([master], lr=learning_rate, betas=(0.9, 0.999))
        for step in range(WARM_UP_STEPS + 1):
            if step == WARM_UP_STEPS:
                before[name] = master.detach().bfloat16()
            master.grad = torch.randn(master.shape, generator=noise)
            optimizer.step()
        after[name] = master.detach().bfloat16()
    return before, after


def patches_of(buffers: list[NamedBuffer]) -> Iterator[tuple[str, ElementPatch]]:
    """Decode the patches as an engine does."""
    for each in buffers:
        spec = TensorSpec(
            each.name, each.dtype, list(each.shape), 0, len(each.data), patch=each.patch
        )
        if each.patch is not None:
            yield each.name, decode_patch(spec, each.data)


def rows(names: tuple[str, ...] = ("smollm2", "0.5b")) -> Iterator[Row]:
    """Return the whole table."""
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            path = make_directory(Path(directory) / "model", SHAPES[name], "bfloat16")
            config = ModelConfig.from_directory(path)
            stored = load_file(path / "model.safetensors")
        weights = Weights.allocate(config, torch.bfloat16)
        shapes = {
            tensor: torch.randn(target.shape) * 0.02
            if len(target.shape) > 1
            else torch.ones(target.shape)
            for tensor, target in weights._copy_targets.items()
        }
        if SHAPES[name].weights is not None:
            shapes = {tensor: stored[tensor] for tensor in shapes}
        for rate in LEARNING_RATES:
            yield from of_one_step(f"{name}/{rate:g}", weights, *step_of_adam(shapes, rate))


def of_one_step(about: str, weights: Weights, before: State, after: State) -> Iterator[Row]:
    """Return the figures of one publish."""
    whole = named_buffers(after)
    whole_bytes = sum(len(each.data) for each in whole)
    written = WrittenElements()
    written.changed(1, named_buffers(before), before=0)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    patched = written.changed(2, whole, before=1)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    assert patched is not None
    patch_bytes = sum(len(each.data) for each in patched)
    changed = sum(int((before[name] != after[name]).sum()) for name in after)
    elements = sum(tensor.numel() for tensor in after.values())
    yield compared(f"{about}/bytes", "of the whole set", patch_bytes / whole_bytes, 1.0)
    yield Row(f"{about}/changed", changed / elements, "of the elements")
    compressor = zstandard.ZstdCompressor(level=1)
    zstd_bytes = sum(len(compressor.compress(each.data)) for each in whole)
    yield Row(f"{about}/zstd", zstd_bytes / whole_bytes, "of the whole set")
    yield Row(f"{about}/make", whole_bytes / wall_s / 1e9, "GB/s")
    yield Row(f"{about}/make_cpu", cpu_s, "s")
    loads, applies = [], []
    for _ in range(REPEATS):
        weights.start()
        begun_s = time.thread_time()
        for tensor_name, tensor in before.items():
            weights.load(tensor_name, tensor)
        loads.append(time.thread_time() - begun_s)
        if all(each.patch is not None for each in patched):
            begun_s = time.thread_time()
            decoded = list(patches_of(patched))
            decoded_s = time.thread_time()
            for tensor_name, patch in decoded:
                weights.patch(tensor_name, torch.bfloat16, patch)
            # Staging keeps the patches of the version before decoded, and applies those first.
            applies.append(decoded_s - begun_s + 2 * (time.thread_time() - decoded_s))
    if applies:
        yield compared(f"{about}/apply", "CPU s", min(applies), min(loads))
