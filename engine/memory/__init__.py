"""Out-of-memory handling, and release of host memory for sleep.

Used by the scheduler, the runners and the worker, through torch and ``madvise``.
"""
