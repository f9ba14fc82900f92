"""KV memory: slabs on CPUs, pages on GPUs."""
