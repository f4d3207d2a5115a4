"""What a run would do under other settings: by closed forms, and by the simulator."""
