"""Benchmarks: `furrow bench NAME` for users, `python -m ops.bench.ROOM.NAME` for the others."""

import os

# An agent sets the same for its ranks. OpenMP reads it when torch is loaded, which several modules of this package do.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
