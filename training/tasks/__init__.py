"""Tasks that the demonstration model learns."""
