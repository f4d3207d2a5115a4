"""Wire protocols of a run: MessagePack messages, ZeroMQ sockets, and weight channels."""
