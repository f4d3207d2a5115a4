"""vLLM-compatible HTTP server over a run's engines, for trainers and clients written for vLLM.

Started by ``tidegate.vllm_server`` and ``tidegate serve``, on the run's event loop. Built on
Starlette, the run's :class:`Scheduler` and its weight updates.
"""
