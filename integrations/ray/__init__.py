"""Engines, environments and trainer ranks as actors on a Ray cluster."""
