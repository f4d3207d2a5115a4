"""Workers that connect external engines, vLLM and SGLang, to a run."""
