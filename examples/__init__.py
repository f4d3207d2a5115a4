"""Example tasks, models and trainers on top of Tidegate, to run and to copy from."""
