"""Adapters that drive other people's engines: vLLM and SGLang."""
