"""External engines (vLLM, SGLang, llama-server): their processes, and requests to them by token ids."""
