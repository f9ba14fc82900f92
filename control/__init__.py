"""The control plane on Redis: keys, messages, state transitions, planning. No torch, no litestar."""
