"""The edge of a connection: heads, bodies, disconnects, turns, keys, limits, origins, and errors as HTTP answers."""
