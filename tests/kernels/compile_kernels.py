"""Compiles the kernels for a GPU that is not present, and prints their shared memory.

Run by ``test_compilation.py`` as ``python -m tests.kernels.compile_kernels TARGET DTYPE``, without
``TRITON_INTERPRET``. Every launch compiles instead of running, so shapes can be those of real
models. Prints one JSON object per line.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tidegate.kernels.fused_sampling import SamplingColumns, fused_sample_triton
from tidegate.kernels.head_logprobs import head_logprobs_triton
from tidegate.kernels.paged_attention import AttentionRule, PagedRows, paged_attention_triton
from tidegate.kernels.residual_norm import residual_norm_triton
from tidegate.kernels.rope_write import rope_write_triton

TARGETS = {
    "a100": GPUTarget("cuda", 80, 32),
    "h100": GPUTarget("cuda", 90, 32),
    "mi300": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


def compile_launches(target: GPUTarget) -> None:
    """Make Triton compile a kernel where it would launch it."""

    def compile_it(kernel: Any, *args: Any, grid: object, warmup: bool, **named: Any) -> None:
        options = {"num_warps": named.pop("num_warps", 4)}
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        print_compiled(target, kernel, given, options)

    triton.JITFunction.run = compile_it


def print_compiled(
    target: GPUTarget, kernel: Any, given: dict[str, Any], options: dict[str, Any]
) -> None:
    """Compile a kernel for arguments like those ``given``, and print its resources."""
    constants = constants_of(kernel, given)
    signature = {n: "constexpr" if n in constants else _type(v) for n, v in given.items()}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, value) in enumerate(given.items())
        if isinstance(value, torch.Tensor)
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    built = triton.compile(source, target=target, options=options)
    line = {"kernel": kernel.__name__, "shared_bytes": built.metadata.shared}
    sys.stdout.write(json.dumps(line) + "\n")


def constants_of(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments whose values Triton specialises on: constants, and
    integers equal to 1."""
    fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    plain = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    return {
        name: value
        for name, value in given.items()
        if name in fixed or (type(value) is int and value == 1 and name not in plain)
    }


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def attention(dtype: torch.dtype, counts: list[int], rule: AttentionRule) -> None:
    """Launch attention with 32 query heads on 8 KV heads of 128, as in Llama 3 8B."""
    rows = PagedRows(
        token_offsets=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int(),
        starts=torch.zeros(len(counts), dtype=torch.int32),
        tables=torch.zeros(len(counts), 256, dtype=torch.int32),
        count_max=max(counts),
    )
    query = torch.zeros(sum(counts), 32, 128, dtype=dtype)
    paged_attention_triton(query, torch.zeros(2, 2, 8, 16, 128, dtype=dtype), rows, rule)


def layers(dtype: torch.dtype) -> None:
    """Launch a step's kernels between its projections, and scoring after the last layer."""
    cache = torch.zeros(2, 2, 8, 16, 128, dtype=dtype)
    ids = torch.zeros(4, dtype=torch.int64)
    table = torch.zeros(64, 2, 128, dtype=dtype)
    qkv = torch.zeros(4, 48, 128, dtype=dtype)
    rope_write_triton(qkv, cache, table=table, positions=ids, slots=ids)
    hidden = torch.zeros(4, 4096, dtype=dtype)
    residual_norm_triton(hidden, hidden, hidden[0], 1e-6)
    residual_norm_triton(qkv, None, table[0, 0], 1e-6, gemma=True)
    head_logprobs_triton(hidden, torch.zeros(5000, 4096, dtype=dtype), ids, soft_cap=30.0)


def columns() -> None:
    """Launch the fused sampling kernel."""
    ids, ones = torch.zeros(4, dtype=torch.int64), torch.ones(4)
    rows = SamplingColumns(ones, ids, ones, ones, ones.double())
    fused_sample_triton(torch.zeros(4, 151_936), rows)


def main() -> None:
    """Launch every kernel once."""
    target, dtype = sys.argv[1:]
    compile_launches(TARGETS[target])
    numbers = getattr(torch, dtype)
    attention(numbers, [1, 1], AttentionRule(scale=0.1))
    attention(numbers, [1, 100], AttentionRule(scale=0.1, window_tokens=512, soft_cap=50.0))
    layers(numbers)
    columns()


if __name__ == "__main__":
    main()
