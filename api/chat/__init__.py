"""A conversation to tokens, and tokens to a message: templates, reasoning, calls of tools."""
