"""Client API of a run: serve, connect, batches, publish; for local and remote trainers.

Local handles submit coroutines to the run's thread; remote handles talk to the run over ZeroMQ.
"""
