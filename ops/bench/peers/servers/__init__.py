"""Engines asked over HTTP, as a client asks them."""
