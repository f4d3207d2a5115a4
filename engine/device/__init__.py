"""GPU backend of the engine: weights, KV cache and steps on a CUDA device, by Triton kernels.

``--device cuda`` selects it.
"""
