"""Models: their layers, their weights loaded and sharded, and their forward in C++ or torch."""
