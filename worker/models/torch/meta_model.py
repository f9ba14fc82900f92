"""A transformers model without weights, its modules on the meta device and its computed buffers real, and the attention
function that it calls."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from control.errors import FurrowError, ModelFilesError
from worker.families.registry import FAMILIES
from worker.kv.base import Attention, Variant
from worker.models.served import are_in_model
from worker.repository.multimodal import FIELD

# The one attention function that every served model calls, in place of transformers' own.


NAME = "furrow"

WINDOW = "masked_window"
"""The attribute with the width of the window of a module of attention that leaves it to the mask."""
GROWTH = "growing_queries"
"""The attribute with β, period and offset by which queries of a module grow (native/rotary.py), where transformers'
module would take a step's tokens for one sequence."""
CHUNKED = "masked_in_chunks"
"""The attribute that says if that is the length of chunks."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache_step: Attention | None = None,
    ends: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a flat batch: query (1, heads, T, dim), key and value (1, kv heads, T, dim) → (1, T, heads, dim).

    T counts the tokens of all sequences in order. `cache_step` stores the new keys and values, and attends each token
    to its own sequence. There is never a mask: the cache keeps causality, but for tokens that see as far as `ends`.
    """
    if cache_step is None:
        raise RuntimeError("the furrow attention needs the step's cache: call the model through ServedModel.forward")
    variant = Variant(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=getattr(module, WINDOW, None) if sliding_window is None else sliding_window,
        chunked=getattr(module, CHUNKED, False),
        softcap=softcap,
        sinks=s_aux,
        ends=ends,
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    if (growth := getattr(module, GROWTH, None)) is not None:
        query = query * _grown(growth, cache_step, query)
    width = value.shape[-1]
    if width != key.shape[-1]:  # the cache has one width for both
        most = max(width, key.shape[-1])
        query, key, value = (pad(tensor, (0, most - tensor.shape[-1])) for tensor in (query, key, value))
    return cache_step.attend(layer, query[0], key[0], value[0], variant)[..., :width].unsqueeze(0), None


def _grown(growth: tuple[float, float, float], step: Any, like: Tensor) -> Tensor:
    """The factors of the queries of a step's tokens: (T, 1)."""
    scale, period, offset = growth
    places = [torch.arange(extent.offset, extent.end, dtype=torch.float64) for extent in step.extents]
    factors = 1 + scale * torch.log1p(((torch.cat(places) + offset) / period).floor())
    return factors.unsqueeze(1).to(like)


CPU = torch.device("cpu")

AttentionInterface.register(NAME, attend)

_NOT_OF_THE_TEXT = ("quantization_config", "compression_config", FIELD, "time_step_limit")
"""The last is served with transformers' default alone, whose infinity has several forms in files."""

_NOT_OF_THE_FILE = (FurrowError, ImportError, MemoryError, torch.OutOfMemoryError)
"""Errors that the making of modules raises whatever the fields are."""

_default_type = threading.Lock()
"""torch's default type is the whole process's: two threads that set and restore it would leave one's to the other."""


def register_unlisted(kind: str) -> None:
    """Let transformers' automatic class make models of a type that it has, and lists only as a part of others."""
    if kind == "mistral4":
        from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM  # only here: it takes time

        AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def configuration(config: dict[str, Any]) -> PreTrainedConfig:
    """config.json as transformers' own class, with its defaults filled in. The format of quantized weights is left
    out: transformers would look for libraries of its own. A `head_dim` of null is what the forward in C++ takes it for,
    where some classes fail. Raises ModelFilesError for what that class refuses."""
    register_unlisted(config["model_type"])
    fields = {name: value for name, value in config.items() if name not in _NOT_OF_THE_TEXT}
    if fields.get("head_dim", 0) is None and "head_dim" in FAMILIES[config["model_type"]].fields:
        fields["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(fields))
    except Exception as error:  # each class has checks of its own
        raise ModelFilesError(f"transformers refuses config.json: {type(error).__name__}: {error}") from error


def meta_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The causal language model of `config` in evaluation mode, every parameter on the meta device. Buffers, which are
    in no checkpoint, are computed on `device`, with `dtype` as the default type so that scalars are rounded as in
    transformers. Raises ModelFilesError for fields with which its modules fail."""
    # The eager loop over experts: the grouped kernels want bf16 and equal widths.
    experts = {"experts_implementation": "eager"} if are_in_model(config) else {}

    def make() -> nn.Module:
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME, **experts)
        except _NOT_OF_THE_FILE:
            raise
        except Exception as error:  # modules compute with fields that the configuration does not check
            raise ModelFilesError(
                f"transformers can't make a model of config.json: {type(error).__name__}: {error}. Correct or remove "
                "the field."
            ) from error

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
