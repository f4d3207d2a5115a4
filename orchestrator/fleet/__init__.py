"""Engines of a run as the orchestrator sees them: membership, heartbeats, processes, scoring.

Everything here works on messages of the wire protocol and on engine subprocesses.
"""
