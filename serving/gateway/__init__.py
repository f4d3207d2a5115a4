"""OpenAI-compatible HTTP API for agents, in which each rollout of a run is a session.

Users create a :class:`Gateway`; its requests become turns of the rollout's :class:`Episode`.
"""
