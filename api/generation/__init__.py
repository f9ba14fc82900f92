"""One request from body to last byte: admission, enqueue, feeds of its tokens, rendering, stored answers, truncation."""
