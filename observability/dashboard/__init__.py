"""Dashboard of a run in the browser and in the terminal, live or from its files.

A run's observers, ``tidegate dashboard`` and ``tidegate top`` start it. It is a Starlette
application on a thread of its own.
"""
