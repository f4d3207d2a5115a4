"""OpenAI-compatible API for agents, over the episodes of a run."""
