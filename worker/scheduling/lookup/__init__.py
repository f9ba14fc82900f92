"""Prompt lookup: tokens guessed from a context, verified in one step."""
