"""KV memory and attention over it: slabs on CPUs, pages and Triton kernels on GPUs.

A layer reads and writes the cache, so models import its layout: KV memory is below the models, and the engine above
them.
"""
