"""Asyncio shell around the core: delivers its events and carries out its commands.

``trainer/run.py`` makes one :class:`Scheduler` per run, on the run's thread; the simulation makes
the same one in virtual time.
"""
