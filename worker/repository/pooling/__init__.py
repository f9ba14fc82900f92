"""Models that give vectors or scores: sentence-transformers' files, and the gate for encoders; no torch."""
