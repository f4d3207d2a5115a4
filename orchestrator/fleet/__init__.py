"""Engines of a run as the orchestrator sees them: membership, heartbeats, processes, scoring.

The scheduler's :class:`EngineSide` uses it. Everything here works on messages of the wire protocol
and on engine subprocesses. Built on asyncio, ``transport/`` and the core's events.
"""
