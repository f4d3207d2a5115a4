"""Client API of a run: serve, connect, batches, publish; for local and remote trainers.

Called by the user's trainer and by the integrations. Local handles submit coroutines to the run's
thread; remote handles talk to the run over ZeroMQ. Built on the scheduler, ``weight_sync/`` and
``batches/``.
"""
