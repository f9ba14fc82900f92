"""The agent of a host, which reconciles ranks with assignments and detects their failures; its supervisor; /metrics."""
