"""The control plane on Redis. At its top: keys, messages, settings, logs, host memory, back-off, confinement. No torch,
no litestar."""
