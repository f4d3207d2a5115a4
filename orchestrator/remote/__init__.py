"""Trainers in other processes: they get batches and bring weights over the wire."""
