"""Deterministic simulation: whole runs in virtual time, with the real scheduler and faults.

``tidegate simulate``, ``tidegate plan``, the scheduling benchmark and the pytest fixtures of users'
tests call it. Built on asyncio with a clock of its own, the orchestrator and ``transport/``'s
codec.
"""
