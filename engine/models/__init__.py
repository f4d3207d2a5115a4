"""What a model directory holds, and what the model in it computes."""
