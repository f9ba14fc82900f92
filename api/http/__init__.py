"""The edge of a connection: heads, bodies, disconnects, turns of tenants, keys, limits, origins, and errors as HTTP
answers."""
