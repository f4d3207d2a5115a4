"""The asyncio shell around the core: carries out its commands."""
