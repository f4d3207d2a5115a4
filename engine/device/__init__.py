"""GPU backend of the engine: weights, KV cache and steps on a CUDA device, by Triton kernels.

Called by the worker with ``--device cuda``. Depends on torch and ``kernels/``.
"""
