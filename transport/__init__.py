"""Wire protocols of a run: MessagePack messages, ZeroMQ sockets, and weight channels.

Used by ``orchestrator/``, ``engine/``, remote trainers and the simulation. Built on pyzmq and
msgspec.
"""
