"""KV memory and attention in torch: pages and Triton kernels on GPUs, attention over slabs on CPUs."""
