"""Turns on their way: placed on engines, sent, and filed token by token as they come back."""
