"""SGLang's HTTP API, as further routes of the vLLM-compatible server.

``vllm_server/server.py`` imports it at start; the routes use the same run, pauses and weight
updates.
"""
