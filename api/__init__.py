"""The HTTP API for the clients of OpenAI, Anthropic and Ollama. Never imports torch or the worker."""
