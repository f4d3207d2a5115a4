"""Tensor parallelism: one engine as several processes, each with a part of every layer."""
