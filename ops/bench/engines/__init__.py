"""External engines: a scripted one in the shape of each, and what a leader costs beside it."""
