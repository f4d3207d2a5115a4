"""How near does the scheduler come to what the machines could do? In virtual time."""
