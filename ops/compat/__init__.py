"""Programs that nobody here wrote, each in an environment of its own, put to work on a farm; and the page about it."""
