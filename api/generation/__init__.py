"""One request from admission to last byte: enqueue, streams that follow and resume, rendering, truncation, stored
answers."""
