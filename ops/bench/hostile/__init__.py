"""One API process under attack."""
