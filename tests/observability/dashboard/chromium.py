"""Flags with which tests and the documentation's screenshots start Chromium."""

CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
"""Without these, Chromium searches for updates, and needs a GPU and a sandbox."""
