"""The parts of a model in memory: its layers and their products, in C++ or torch; their loading; the memory that a
rank needs."""
