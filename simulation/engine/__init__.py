"""Simulated engines, and the wire between them and the scheduler."""
