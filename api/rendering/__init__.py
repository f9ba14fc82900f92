"""Token log to chunks and events of each endpoint."""
