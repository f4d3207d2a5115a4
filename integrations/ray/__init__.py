"""Engines, environments and trainer ranks on a Ray cluster."""
