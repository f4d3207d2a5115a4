"""Environments and tools in worker processes, and episodes in which the model acts in them.

Users give the pool to their episodes. Processes are reached over sockets with MessagePack frames.
"""
