"""Orchestrator of a run: its scheduler, client handles, engine fleet, journal and settings.

Started by ``tidegate.serve`` and ``tidegate serve``, on a thread of the trainer's process. Talks to
engine processes over ZeroMQ only (``transport/``), and never imports ``engine/``. It runs on
asyncio (uvloop), msgspec and ``policies/``.
"""
