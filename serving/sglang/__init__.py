"""SGLang's HTTP API, served beside vLLM's by the same server."""
