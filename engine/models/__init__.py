"""Model code: configs and tensors of a Hugging Face directory, and the CPU's forward pass.

Used by the runners and the worker. Implements Llama-style decoders on torch and ``kernels/``.
"""
