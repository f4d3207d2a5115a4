"""Tidegate's inference engine: worker process, models, KV cache, sampler and step scheduler.

The orchestrator starts ``engine/worker.py`` as a process, and speaks to it over ZeroMQ. Also the
adapters of vLLM and SGLang (``engine/external``). Imports nothing of the orchestrator.
"""
