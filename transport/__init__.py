"""The wire between orchestrator, engines and trainers: messages, sockets, weight channels."""
