"""Other people's engines, driven as Tidegate's own is: a worker that speaks both languages."""
