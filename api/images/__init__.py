"""Images of requests: where they come from, their limits, and their decoding in a process of its own."""
