"""Triton kernels in the place of transformers' modules. They are only imported for a GPU or Triton's interpreter."""

import os

# As in worker/kv/torch.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
