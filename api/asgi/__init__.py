"""The connection's edge: what is read from a client before a handler sees it, and what bounds it."""
