"""The Redis control plane: keys, messages, atomic transitions and the command line. Knows no torch and no litestar."""
