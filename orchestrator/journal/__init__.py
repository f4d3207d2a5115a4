"""Write-ahead journal of a run's events (SQLite), and resume and replay from it.

The scheduler writes it; ``serve(resume=…)``, ``tidegate replay`` and the simulation read it.
Records are the core's events and state.
"""
