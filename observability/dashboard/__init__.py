"""Dashboard of a run in the browser and in the terminal, live or from its files.

Started by a run's observers, ``tidegate dashboard`` and ``tidegate top``. Starlette on a thread of
its own.
"""
