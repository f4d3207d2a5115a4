"""Where engines run: on this machine, or on those that Ray has."""
