"""The HTTP API for OpenAI's, Anthropic's and Ollama's clients. At its top: the process itself. Never imports torch or
the worker."""
