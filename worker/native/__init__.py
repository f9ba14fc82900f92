"""C++ for CPUs: its sources, its compilation, its memory."""
