"""One API process with many streams."""
