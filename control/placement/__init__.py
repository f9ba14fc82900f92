"""The planner: which host runs which rank, how many replicas run, rollouts, moves, and memory that is given back."""
