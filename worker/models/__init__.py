"""Models: weights loaded, sharded and run, in torch or C++."""
