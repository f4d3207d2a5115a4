"""Environments of other packages, each imported only when its adapter is used."""
