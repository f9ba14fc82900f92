"""One request from its body to its last byte: admission, enqueue, its tokens from Redis, rendering, storage."""
