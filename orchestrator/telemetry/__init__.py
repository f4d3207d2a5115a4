"""Statistics, forecast, watchdog and the recorder's interface."""
