"""Parts that surround a running farm: the demonstration model, benchmarks, and what operators deploy."""
