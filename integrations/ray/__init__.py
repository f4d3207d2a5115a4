"""Engines, environments and trainer ranks as actors on a Ray cluster.

``cluster="ray"``, ``ray_workers`` and ``train_on_ray`` select them. Ray places processes; data goes
over ZeroMQ.
"""
