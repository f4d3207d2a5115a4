"""Settings of a run, checked before any process starts.

Read by ``tidegate.serve``, ``tidegate run``, the simulation and every part of the orchestrator.
Built on pydantic.
"""
