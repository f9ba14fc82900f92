"""Tiny random checkpoints that take images, pictures for them, and what transformers answers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from control.messages import PromptImage
from tests import models

VISION_START, IMAGE_PAD, VISION_END = 131, 132, 133
VOCAB_SIZE = 134
UNIT = 8
"""A token is a square of so many pixels."""
SIDE = 32
"""Of gemma3's images."""

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}"
)

QWEN_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
GEMMA_MARKS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")

PROCESSOR: dict[str, Any] = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 8 * 8, "longest_edge": 8 * 8 * 24},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
GEMMA_PROCESSOR: dict[str, Any] = {
    "do_pan_and_scan": None,
    "size": {"height": SIDE, "width": SIDE},
    "resample": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 3,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
    "initializer_range": 0.2,
}
GEMMA_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 4,
    "vision_use_head": False,
}


@dataclass(frozen=True)
class Picture:
    """A picture as a model takes it: pixels (height, width, 3) uint8 after resizing."""

    original: Image.Image
    pixels: np.ndarray

    @property
    def data(self) -> bytes:
        return self.pixels.tobytes()

    def placed(self, start: int) -> PromptImage:
        height, width = self.pixels.shape[:2]
        digest = hashlib.sha256(f"{height} {width} ".encode() + self.data).hexdigest()
        return PromptImage(start, height // UNIT * (width // UNIT), height, width, digest)


def qwen3_vl(folder: Path, tie: bool = False, kind: str = "qwen3_vl", **changes: Any) -> Path:
    """`changes` are those of the text part."""
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = models.SHAPE | {"vocab_size": VOCAB_SIZE, "rope_parameters": sections, "tie_word_embeddings": tie}
    text |= changes
    config = CONFIG_MAPPING[kind](
        text_config=text,
        vision_config=VISION,
        tie_word_embeddings=tie,
        image_token_id=IMAGE_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return _saved(folder, config, QWEN_MARKS, "".join(QWEN_MARKS), PROCESSOR)


def qwen3_vl_moe(folder: Path, **changes: Any) -> Path:
    return qwen3_vl(folder, kind="qwen3_vl_moe", **models.FAMILY_SHAPES["qwen3_moe"] | {"num_experts": 6} | changes)


def qwen3_5(folder: Path, kind: str = "qwen3_5", **changes: Any) -> Path:
    """Recurrent layers, and half of a head is turned."""
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    shape = models.SHAPE | models.FAMILY_SHAPES[f"{kind}_text"] | {"vocab_size": VOCAB_SIZE} | changes
    vision = {name: value for name, value in VISION.items() if name != "deepstack_visual_indexes"}
    config = CONFIG_MAPPING[kind](
        text_config=shape | {"rope_parameters": sections | {"partial_rotary_factor": 0.5}},
        vision_config=vision,
        image_token_id=IMAGE_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return _saved(folder, config, QWEN_MARKS, "".join(QWEN_MARKS), PROCESSOR)


def qwen3_5_moe(folder: Path, **changes: Any) -> Path:
    return qwen3_5(folder, "qwen3_5_moe", **changes)


def gemma3(folder: Path, norm_noise: float = 3.0, **changes: Any) -> Path:
    """Its window is shorter than an image."""
    text = models.SHAPE | models.FAMILY_SHAPES["gemma3_text"] | {"vocab_size": VOCAB_SIZE} | changes
    config = CONFIG_MAPPING["gemma3"](
        text_config=text,
        vision_config=GEMMA_VISION,
        mm_tokens_per_image=(SIDE // UNIT) ** 2,
        image_token_index=IMAGE_PAD,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
    )
    return _saved(folder, config, GEMMA_MARKS, GEMMA_MARKS[0], GEMMA_PROCESSOR, norm_noise)


def _saved(
    folder: Path,
    config: Any,
    marks: tuple[str, ...],
    written: str,
    processor: dict[str, Any],
    norm_noise: float = 0.1,
) -> Path:
    """A model of `config` whose images matter; `marks` are its tokens, `written` what its template has for an image,
    `norm_noise` the noise of its text layers' norms."""
    torch.manual_seed(1 if config.model_type == "gemma3" else 0)  # answers of several tokens
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mm_input_projection" in name:
                parameter.add_(torch.randn_like(parameter))
            elif "norm" in name:
                layers = norm_noise if "language_model.layers" in name else 0.1
                parameter.add_(layers * torch.randn_like(parameter))
            elif ("visual" in name or "vision_tower" in name) and parameter.dim() > 1:
                parameter.mul_(10)
    model.save_pretrained(folder)
    tokenizer = models.tokenizer()
    tokenizer.add_tokens([AddedToken(name, special=True) for name in marks])
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", written)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def noise(seed: int, width: int, height: int) -> Image.Image:
    """A picture of random squares, so that neighbours differ and resizing matters."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 3 + 1, width // 3 + 1, 3), dtype=np.uint8)
    return Image.fromarray(coarse.repeat(3, 0).repeat(3, 1)[:height, :width])


def processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(**PROCESSOR)


def gemma_processor() -> Any:
    return partial(Gemma3ImageProcessorPil(**GEMMA_PROCESSOR), do_pan_and_scan=False)


def picture(seed: int, width: int = 30, height: int = 21) -> Picture:
    """Resized as transformers' processor of Qwen does it."""
    original, ours = noise(seed, width, height), processor()
    found = ours([original], do_rescale=False, do_normalize=False, return_tensors="np")
    _, rows, columns = found["image_grid_thw"][0]
    cut = found["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 4, 4)[:, :, :, :, :, 0]
    whole = cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 4, columns * 4, 3)
    return Picture(original, whole.astype(np.uint8))


def square(seed: int, width: int = 30, height: int = 21) -> Picture:
    """Resized as transformers' processor of Gemma 3 does it."""
    original = noise(seed, width, height)
    found = gemma_processor()([original], do_rescale=False, do_normalize=False, return_tensors="np")
    return Picture(original, found["pixel_values"][0].transpose(1, 2, 0).astype(np.uint8))


def prompt_with(pictures: list[Picture], text: int = 9) -> tuple[list[int], list[PromptImage]]:
    """Text, then each picture with text behind it."""
    words = np.random.default_rng(text).integers(0, 128, text * (len(pictures) + 1)).tolist()
    prompt, images = words[:text], list[PromptImage]()
    for index, one in enumerate(pictures, 1):
        prompt.append(VISION_START)
        images.append(one.placed(len(prompt)))
        prompt += [IMAGE_PAD] * images[-1].count + [VISION_END] + words[index * text : (index + 1) * text]
    return prompt, images


def generated(folder: Path, prompt: list[int], pictures: list[Picture], new: int) -> list[int]:
    """The greedy answer of transformers' processor and whole model in float64."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    # Experts in a plain loop: the grouped kernels lack float64.
    options = {"experts_implementation": "eager"} if "moe" in kind else {}
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, **options)
    gemma = kind == "gemma3"
    tokens = torch.tensor([prompt])
    given: dict[str, Any] = {}
    if pictures:
        prepare = gemma_processor() if gemma else processor()
        given = dict(prepare([one.original for one in pictures], return_tensors="pt"))
        given.pop("num_crops", None)
        given["pixel_values"] = given["pixel_values"].double()
        given["token_type_ids" if gemma else "mm_token_type_ids"] = (tokens == IMAGE_PAD).int()
    answer = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **given,
    )
    return answer[0, len(prompt) :].tolist()


def image_tokens(one: Picture) -> list[int]:
    """The tokens that stand for a picture in a prompt, with the marks around them."""
    return [VISION_START, *([IMAGE_PAD] * one.placed(0).count), VISION_END]
