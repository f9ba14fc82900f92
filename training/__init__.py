"""Training of the demonstration model."""
