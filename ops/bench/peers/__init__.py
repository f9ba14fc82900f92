"""Furrow beside other engines, on the same weights."""
