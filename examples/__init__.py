"""What users write on top of Tidegate: tasks, models, trainers."""
