"""Parts that benchmarks share: a private farm, clients, prompts, summaries."""
