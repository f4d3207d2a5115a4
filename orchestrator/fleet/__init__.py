"""Engines of a run: membership, heartbeats, processes, sessions and scoring."""
