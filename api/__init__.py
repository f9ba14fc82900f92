"""The OpenAI-compatible HTTP API. Knows litestar and tokenizers, never torch and never the worker."""
