"""Steps on GPUs: CUDA graphs, a step launched ahead."""
