"""Errors as HTTP answers, for the clients of OpenAI, Anthropic and Ollama."""
