"""Client connections: heads, bodies, disconnects and their limits."""
