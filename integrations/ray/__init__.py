"""Engines, environments and trainer ranks as actors on a Ray cluster.

Chosen by ``cluster="ray"``, ``ray_workers`` and ``train_on_ray``. Ray places processes; data goes
over ZeroMQ. Built on the package ``ray``.
"""
