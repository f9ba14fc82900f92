"""The HTTP API for OpenAI's and Anthropic's clients. Never imports torch or the worker."""
