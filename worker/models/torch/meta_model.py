"""A transformers model without weights: its modules on the meta device, its computed buffers real."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from control.errors import ModelFilesError
from worker.models.served import are_in_model
from worker.models.torch import registered
from worker.repository.multimodal import FIELD

CPU = torch.device("cpu")

AttentionInterface.register(registered.NAME, registered.attend)

_NOT_OF_THE_TEXT = ("quantization_config", "compression_config", FIELD, "time_step_limit")
"""The last is served with transformers' default alone, whose infinity has several forms in files."""

_default_type = threading.Lock()
"""torch's default type is the whole process's: two threads that set and restore it would leave one's to the other."""


def register_unlisted(kind: str) -> None:
    """Let transformers' automatic class make models of a type that it has, and lists only as a part of others."""
    if kind == "mistral4":
        from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM  # only here: it takes time

        AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def configuration(config: dict[str, Any]) -> PreTrainedConfig:
    """config.json as transformers' own class, with its defaults filled in. The format of quantized weights is left
    out: transformers would look for libraries of its own. Raises ModelFilesError for what that class refuses."""
    register_unlisted(config["model_type"])
    fields = {name: value for name, value in config.items() if name not in _NOT_OF_THE_TEXT}
    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(fields))
    except Exception as error:  # each class has checks of its own
        raise ModelFilesError(f"transformers refuses config.json: {type(error).__name__}: {error}") from error


def meta_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The causal language model of `config` in evaluation mode, every parameter on the meta device. Buffers, which are
    in no checkpoint, are computed on `device`, with `dtype` as the default type so that scalars are rounded as in
    transformers."""
    # The eager loop over experts: the grouped kernels want bf16 and equal widths.
    experts = {"experts_implementation": "eager"} if are_in_model(config) else {}

    def make() -> nn.Module:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=registered.NAME, **experts)

    return build_meta(make, dtype, device)


def build_meta(make: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device = CPU) -> nn.Module:
    """The model of transformers that `make` makes, as `meta_model`."""
    with _default_type:
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                model = make()
            _compute_buffers(model, device)
        finally:
            torch.set_default_dtype(previous)
    return model.eval()


def _compute_buffers(model: Any, device: torch.device) -> None:
    """Run the model's own initialisation for modules with buffers; on their parameters, still meta, it does nothing."""
    for module in model.modules():
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        if names:
            # A body is a model of transformers too, whose initialisation may read what only it has.
            owner = module if hasattr(module, "_init_weights") else model
            with torch.no_grad():
                owner._init_weights(module)
