"""KV memory and attention over it: slabs on CPUs, pages and Triton kernels on GPUs."""
