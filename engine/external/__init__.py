"""Workers that connect external engines (vLLM, SGLang servers, over HTTP) to a run.

The orchestrator starts one ``external/worker.py`` per URL in ``engine_urls``.
"""
