"""Images and health checks of containers."""
