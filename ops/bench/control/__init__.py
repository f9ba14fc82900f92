"""The cost of Redis in a step."""
