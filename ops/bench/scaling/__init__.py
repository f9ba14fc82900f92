"""A farm of real size without its models: what Redis and a leader take for it."""
