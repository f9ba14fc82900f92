"""Bodies of requests with the checks of their fields, and answers as they are encoded: one struct each."""
