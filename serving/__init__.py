"""HTTP servers in front of a run: OpenAI's API for agents (gateway), vLLM's and SGLang's APIs, and
the Tinker API.

Started by ``tidegate.Gateway``, ``tidegate.vllm_server``, ``tidegate.tinker_server``, ``tidegate
serve`` and ``tidegate tinker``. ASGI applications on Starlette and uvicorn, on the run's event
loop. They use the run's :class:`Episode`, scheduler and chat template.
"""
