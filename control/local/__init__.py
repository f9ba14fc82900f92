"""The private server of one machine."""
