"""The engine beside other engines."""
