"""SGLang's HTTP API, as further routes of the vLLM-compatible server."""
