"""Forward passes on the CPU: step runner, transformers fallback, and sleep of their memory.

The engine loop calls the runner and sleep; the worker opens the model. Uses torch and ``kernels/``.
"""
