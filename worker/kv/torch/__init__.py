"""KV memory and attention in torch: pages and Triton kernels on GPUs, attention over slabs on CPUs."""

import os

# Fused multiply-add is set before Triton is imported, because Triton is about to change its default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
