"""Weight versions and LoRA adapters: staging beside the live weights, and the swap.

Tensors come over the weight channels of ``transport/``. Copies run on a thread.
"""
