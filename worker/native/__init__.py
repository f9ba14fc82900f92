"""The C++ library for CPUs: its sources, its compilation or choice, its memory."""
