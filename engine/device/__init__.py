"""The engine on a GPU: weights, KV and steps on a device, by Triton kernels."""
