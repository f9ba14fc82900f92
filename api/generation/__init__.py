"""One request from its body to its answer: validation, admission, enqueue, stream, storage."""
