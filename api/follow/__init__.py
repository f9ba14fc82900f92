"""Tokens of a request as they come from Redis: pub/sub, the token log, recovery."""
