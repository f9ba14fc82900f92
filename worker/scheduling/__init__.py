"""The scheduler, which plans a step: admission, KV accounting, shared prefixes, guesses (lookup), shares; no torch."""
