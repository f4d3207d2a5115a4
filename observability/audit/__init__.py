"""Audit of a recorded run: replays its tokens through the archived weights.

It computes with transformers, and with the engine only for ``--exact``.
"""
