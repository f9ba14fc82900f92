"""Errors as HTTP answers, for OpenAI's and Anthropic's clients."""
