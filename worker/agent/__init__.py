"""The agent of a host: reconciles ranks with assignments, and detects their failures."""
