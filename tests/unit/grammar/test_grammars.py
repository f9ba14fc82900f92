"""Grammars on rank 0: what they allow, where they end, and that a failure stays with its row."""
