"""HTTP server, limits, access and error answers, shared by every server and the dashboard."""
