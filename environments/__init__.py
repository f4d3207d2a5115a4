"""Environments and tools in processes of their own, and episodes played in them."""
