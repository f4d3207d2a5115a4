"""Environments and tools in worker processes, and episodes in which the model acts in them.

Users pass an :class:`EnvironmentPool` to their episodes. The pool talks to its processes over
sockets, in MessagePack frames.
"""
