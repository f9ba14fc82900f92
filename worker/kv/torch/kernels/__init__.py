"""Triton kernels of attention over pages. They are only imported for a GPU or Triton's interpreter.

Launchers take tensors and read no value from the device, so that a CUDA graph can hold what they launch.
"""

import os

# Fused multiply-add is set here, because Triton is about to change its default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
