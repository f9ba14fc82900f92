"""External engines, vLLM, SGLang and llama-server: started, asked for tokens by ids, and heard."""
