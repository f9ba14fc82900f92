"""The encoder of Qwen's models with images: patches of any number of rows and columns, merged by neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel

from worker.models.torch.meta_model import build_meta
from worker.models.torch.vision.pixels import patches


class QwenEncoder(nn.Module):
    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        """`config`: transformers' vision configuration. The parameters are on the meta device."""
        super().__init__()

        def make() -> nn.Module:
            return AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")

        self.visual: Any = build_meta(make, dtype)

    @property
    def blocks(self) -> Any:
        return self.visual.blocks

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        config = self.visual.config
        cut = patches(image, config.patch_size, config.spatial_merge_size, config.temporal_patch_size)
        height, width = (side // config.patch_size for side in image.shape[1:])
        encoded = self.visual(cut, grid_thw=torch.tensor([[1, height, width]]), return_dict=True)
        rows = encoded.pooler_output
        deep = getattr(encoded, "deepstack_features", ())
        return rows, torch.stack(list(deep)) if len(deep) else rows.new_empty(0, *rows.shape)
