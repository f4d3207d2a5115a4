"""HTTP servers in front of a run: OpenAI's API for agents, and vLLM's API."""
