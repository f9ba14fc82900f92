"""Packed weights in files of the user's cache, from which the next start of a rank reads them."""
