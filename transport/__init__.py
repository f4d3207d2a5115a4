"""The wire: messages, sockets and weight channels. Knows nothing of what a rollout means."""
