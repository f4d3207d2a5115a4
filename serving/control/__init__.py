"""What a server over a run's engines does to them: pauses, sleep, new weights and adapters.

The paths of vLLM's and SGLang's APIs call it.
"""
