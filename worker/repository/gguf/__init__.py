"""GGUF files read without torch: metadata, tensors, configuration and tokenizer."""
