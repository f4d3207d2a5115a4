"""Deterministic simulation: whole runs in virtual time, with the real scheduler and faults.

Used by ``tidegate simulate``, ``tidegate plan``, and the pytest fixtures of users' tests. Built on
asyncio with a clock of its own, the orchestrator and ``transport/``'s codec.
"""
