"""One forward of a batch: checks, CUDA graphs, a step launched ahead."""
