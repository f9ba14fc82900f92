"""Products and whole forwards in C++, compiled for the processor they run on."""
