"""One request from body to last byte: admission, enqueue, feeds of tokens, rendering, stored answers, truncation."""
