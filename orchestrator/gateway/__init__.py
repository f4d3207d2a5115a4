"""OpenAI's API for agents that know nothing of Tidegate."""
