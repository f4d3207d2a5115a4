"""Model code: configs and tensors of a Hugging Face directory, and the CPU's forward pass.

The models are Llama-style decoders.
"""
