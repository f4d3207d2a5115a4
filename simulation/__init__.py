"""Whole runs in virtual time: for our tests, and for those of users."""
