"""Roofline of a decode step on this machine, from measured memory bandwidth and GEMM throughput.

A step reads every weight once and multiplies it with each row; the slower of the two is the limit.
KV and sampling are not counted, so no engine can reach 100%. The GEMM rate is that of large
matrices, by torch or by the engine's own kernel, whichever is faster: in float32 torch's is less
than half of it on some processors.
"""

import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.engine.shapes import Shape
from tidegate.kernels.weight_matrix import make_matrix

READ_BYTES = 256 * 1024 * 1024
"""Size of the read benchmark, larger than a core's caches."""

GEMM_SIZE = 1024
"""GEMM size; larger ones take minutes on processors without bfloat16."""

RUNS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits of one core."""

    read_bytes_per_s: float
    flops_per_s: float
    """GEMM throughput in the model's dtype, or in float32 if that is faster, because weights can be
    widened on the fly."""

    @classmethod
    def measured(cls, dtype: str) -> "Machine":
        """Measure this machine, on one thread, by CPU time."""
        torch.set_num_threads(1)
        numbers = torch.ones(READ_BYTES // 4)
        read_s = statistics.median(_cpu_s(lambda: numbers.sum()) for _ in range(RUNS))
        gemm_s = min(
            product_s(dtype)
            for dtype in {getattr(torch, dtype), torch.float32}
            for product_s in (_gemm_s, _engines_gemm_s)
        )
        return cls(READ_BYTES / read_s, 2 * GEMM_SIZE**3 / gemm_s)

    def step_us(self, shape: Shape, dtype: str, rows: int) -> float:
        """Return the minimum time of a step of ``rows``; the head counts as stored in the model's
        dtype."""
        parameters = _parameters(shape)
        read_s = parameters * (4 if dtype == "float32" else 2) / self.read_bytes_per_s
        multiply_s = 2 * parameters * rows / self.flops_per_s
        return 1e6 * max(read_s, multiply_s)


def _gemm_s(dtype: torch.dtype) -> float:
    square = torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=dtype)
    return statistics.median(_cpu_s(lambda: square @ square) for _ in range(RUNS))


def _engines_gemm_s(dtype: torch.dtype) -> float:
    square = torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=dtype)
    matrix = make_matrix(GEMM_SIZE, GEMM_SIZE, dtype)
    matrix.rows(0, GEMM_SIZE).copy_(square)
    return statistics.median(_cpu_s(lambda: matrix.linear(square)) for _ in range(RUNS))


def _cpu_s(work: object) -> float:
    assert callable(work)
    work()
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def _parameters(shape: Shape) -> int:
    """Return the number of parameters that each token is multiplied with: layers and head."""
    fields = shape.fields
    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    head_dim = fields.get("head_dim", hidden // fields["num_attention_heads"])
    heads = fields["num_attention_heads"] + fields["num_key_value_heads"]
    layer = 2 * hidden * heads * head_dim + 3 * hidden * inner
    return int(fields["num_hidden_layers"] * layer + hidden * fields["vocab_size"])
