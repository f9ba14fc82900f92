"""Models that give vectors or scores: encoders, and what becomes of hidden states."""
