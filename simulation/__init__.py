"""Deterministic simulation: whole runs in virtual time, with the real scheduler and faults.

Rooms, from the top down; each imports only from rooms below it:

* ``planning/``: forecast of a run's throughput and staleness
* ``run/``: whole runs: the clock, trainers, episodes, crashes and restarts, sweeps, users' tests
* ``engine/``: one simulated engine, its wire and host; scripted, coarse-grained and computing ones
* ``checks/``: oracle of a run: what engines did, what tokens must be, which promises hold
* ``faults/``: what a seed draws: faults, and the scenario of a run

To inject another fault, add a kind to ``faults/faults.py`` and what it does to
``EngineHost``. To hold another promise, add a check to ``checks/invariants.py``.
"""
