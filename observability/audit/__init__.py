"""Audit of a recorded run: replays its tokens through the archived weights.

Called by ``tidegate audit``. Depends on transformers and the run's directory, not on the engine.
"""
