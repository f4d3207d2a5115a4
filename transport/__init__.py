"""Wire between orchestrator, engines and trainers: MessagePack messages, ZeroMQ sockets, weight
channels.

Used by ``orchestrator/``, ``engine/`` and the simulation, which share nothing else.
"""
