"""Triton kernels and their launchers. Only imported where the device is a GPU, or under Triton's interpreter in tests.

Launchers take tensors and read no value from the device, so that a CUDA graph can hold what they launch.
"""

import os

# Whether a product and a sum become one instruction: said here, as Triton is about to change its default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
