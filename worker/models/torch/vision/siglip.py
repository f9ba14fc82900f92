"""The encoder of gemma3: SigLIP over all patches of an image, whose outputs are averaged by neighbours and projected to
the width of the text part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

from worker.models.torch.meta_model import build_meta


class SiglipEncoder(nn.Module):
    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        """`config`: transformers' Gemma3Config. The parameters are on the meta device. Pooling of a whole image to one
        vector is left out: nothing reads it."""
        super().__init__()
        config.vision_config.vision_use_head = False

        def make() -> nn.Module:
            return AutoModel.from_config(config.vision_config, dtype=dtype, attn_implementation="sdpa")

        self.vision_tower: Any = build_meta(make, dtype)
        with torch.device("meta"):
            self.multi_modal_projector = Gemma3MultiModalProjector(config)

    @property
    def blocks(self) -> Any:
        return self.vision_tower.encoder.layers

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        encoded = self.vision_tower(pixel_values=image.unsqueeze(0), return_dict=True)
        rows = self.multi_modal_projector(encoded.last_hidden_state)[0]
        return rows, rows.new_empty(0, *rows.shape)
