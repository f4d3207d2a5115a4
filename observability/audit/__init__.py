"""Audit of a recorded run: replays its tokens through the archived weights."""
