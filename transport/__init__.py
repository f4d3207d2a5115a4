"""The wire between orchestrator, engines and trainers: messages, ZeroMQ sockets, weight
channels."""
