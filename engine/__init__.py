"""Tidegate's inference engine: worker process, models, KV cache, sampler and step scheduler.

The orchestrator starts ``engine/worker.py`` as a process, and speaks to it over ZeroMQ.
``engine/external`` has the adapters of vLLM and SGLang. The engine imports nothing of the
orchestrator: they share only the wire.
"""
