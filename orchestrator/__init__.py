"""Decides and moves: what starts, where it runs, what the trainer gets, which weights serve."""
