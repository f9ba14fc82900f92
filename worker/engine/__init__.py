"""One forward of a whole model on all ranks, from command to logits, held to transformers; CUDA graphs, a step
launched ahead."""
