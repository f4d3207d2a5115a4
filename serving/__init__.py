"""HTTP servers in front of a run: OpenAI's API for agents (gateway), and vLLM's and SGLang's APIs.

Started by ``tidegate.Gateway``, ``tidegate.vllm_server`` and ``tidegate serve``. ASGI applications
on Starlette and uvicorn, on the run's event loop. They use the run's :class:`Episode`, scheduler
and chat template.
"""
