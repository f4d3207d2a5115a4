"""Adapters for other people's trainers, clusters and environment packages."""
