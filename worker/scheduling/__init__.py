"""The scheduler: admission, KV accounting, prefix cache, shares; no torch."""
