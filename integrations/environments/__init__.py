"""Environment packages as Tidegate environments."""
