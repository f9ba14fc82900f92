"""Decides from config.json alone whether a model can be served and sharded, before any process is spawned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from control.errors import ModelFilesError, SettingsError, UnsupportedArchitecture
from worker.families.family import Family
from worker.families.recurrence import Mamba, Recurrence
from worker.families.registry import FAMILIES, REFUSED, TEXT_PARTS, mechanism_of
from worker.repository import config_fields
from worker.repository.config_fields import number, token_ids
from worker.repository.files import ModelFiles, inspect
from worker.repository.pooling import check_pooling, is_encoder, longest_input, pooling_of
from worker.weights.schemes import scheme_of

MOST_RANKS = 64
"""Remedies name no number above it: the size of a hostile file has two billion candidates."""

__all__ = ["ModelFiles", "check", "context_length", "eos_ids", "family_of", "inspect", "kv_heads", "layer_kv_heads"]


def check(config: dict[str, Any], tp: int, max_context: int | None = None, quant: str | None = None) -> None:
    """Raise UnsupportedArchitecture naming the type, the number that `tp` ranks can't divide, what `quant` can't pack,
    or the format of quantized weights that is not served; ModelFilesError for a `max_context` beyond the model's
    own."""
    pooling = pooling_of(config)
    if pooling is not None:
        check_pooling(config, pooling, tp, quant)
    if is_encoder(config):
        _check_context(config, max_context)
        return
    family = family_of(config)
    if tp < 1:
        raise UnsupportedArchitecture(f"Tensor parallelism must be at least 1, not {tp}.")
    _check_quantization(config, family, quant)
    _check_features(config, family)
    config_fields.check(config, family)
    _check_recurrence(config, tp)
    config_fields.check_head_width(config, family)
    heads = number(config, "num_attention_heads")
    for shared in sorted(set(layer_kv_heads(config))):
        if heads % shared:
            raise UnsupportedArchitecture(f"{heads} attention heads can't share {shared} key-value heads evenly.")
        if heads % tp:
            raise UnsupportedArchitecture(
                f"{heads} attention heads can't be divided among {tp} ranks. {_remedy(heads)}"
            )
        if shared % tp and tp % shared:
            raise UnsupportedArchitecture(
                f"{shared} key-value heads can be neither divided among {tp} ranks nor repeated on them. "
                f"{_remedy(shared)}"
            )
    _check_widths(config, family, tp)
    _check_context(config, max_context)


def check_shares(config: dict[str, Any], shares: Sequence[int], tp: int, quant: str | None = None) -> None:
    """Raise UnsupportedArchitecture where `tp` ranks can't have these units of all heads and widths: what so many ranks
    as there are units could share evenly, neighbours among them can have together. The families whose ranks sum norms,
    or keep recurrent states, have even shares."""
    units = sum(shares)
    if len(shares) != tp or min(shares) < 1:
        raise UnsupportedArchitecture(f"The shares {list(shares)} are not those of {tp} ranks, with one unit at least.")
    family = family_of(config)
    if is_encoder(config) or family.recurrent or "width_norm" in family.roles.values():
        raise UnsupportedArchitecture(f"Ranks of model type '{config['model_type']}' have even shares.")
    check(config, units, None, quant)
    for shared in sorted(set(layer_kv_heads(config))):
        if shared % units:
            raise UnsupportedArchitecture(f"{shared} key-value heads can't be divided into {units} units.")


def _check_context(config: dict[str, Any], max_context: int | None) -> None:
    if max_context is not None and max_context > context_length(config):
        raise ModelFilesError(
            f"--max-context {max_context} is more than the model's {context_length(config)} positions. "
            "Leave it away, or give a smaller one."
        )


def family_of(config: dict[str, Any]) -> Family:
    """The record of a configuration's type; raises UnsupportedArchitecture listing what is served."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    reason = mechanism_of(config)
    if str(kind) not in REFUSED and ("text_config" in config or "vision_config" in config):
        reason = f"of the types with images only the text of {', '.join(sorted(TEXT_PARTS))} is served"
    supported = ", ".join(sorted([*FAMILIES, *TEXT_PARTS]))
    raise UnsupportedArchitecture(
        f"Model type {kind!r} is not supported: {reason}. Supported model types: {supported}. An external engine may "
        "serve it: --engine vllm, sglang or llama-server."
    )


def kv_heads(config: dict[str, Any]) -> int:
    """Key-value heads of the whole model, before any division."""
    heads = config.get("num_key_value_heads", family_of(config).kv_heads)
    return number(config, "num_attention_heads") if heads is None else int(heads)


def layer_kv_heads(config: dict[str, Any]) -> list[int]:
    """Key-value heads of each layer of the whole model."""
    usual = kv_heads(config)
    by_layer = family_of(config).heads_by_layer
    if by_layer is None:
        return [usual] * number(config, "num_hidden_layers")
    return [layer.get("num_key_value_heads", usual) for layer in by_layer(config)]


def is_double_wide(config: dict[str, Any], fields: Mapping[str, Any], layer: int) -> bool:
    """True if a layer's feed-forward network is twice as wide as others, as those of layers with keys and values of
    earlier ones may be. `fields`: as `config_fields.fields_of`."""
    return bool(fields.get("use_double_wide_mlp")) and shares_keys(config, fields, layer)


def shares_keys(config: dict[str, Any], fields: Mapping[str, Any], layer: int) -> bool:
    """True for a layer that reads the keys and values of an earlier one."""
    return layer >= config["num_hidden_layers"] - (fields.get("num_kv_shared_layers") or 0)


def recurrence(config: dict[str, Any]) -> Recurrence | None:
    """The recurrent layers of the model; None for one without. Raises ModelFilesError or UnsupportedArchitecture
    naming a field and its value."""
    recurrent = family_of(config).recurrent
    return None if recurrent is None else recurrent(config)


def check_devices(config: dict[str, Any], devices: Sequence[str]) -> None:
    """Raise SettingsError for a device that keeps no recurrent states, which models of the type have."""
    other_devices = [device for device in devices if not device.startswith("cpu")]
    if other_devices and "attention_chunk_size" in family_of(config).fields:
        raise SettingsError(
            f"Model type '{config['model_type']}' has attention within chunks, which is served on CPUs only, not on "
            f"{other_devices[0]}. Use --devices cpu."
        )
    if other_devices and family_of(config).recurrent:
        raise SettingsError(
            f"Model type '{config['model_type']}' is one with recurrent layers: all its models are served on CPUs "
            f"only, not on {other_devices[0]}. Use --devices cpu."
        )


def context_length(config: dict[str, Any]) -> int:
    """Positions that the model was made for: prompt and answer together; an input of a model for vectors or scores."""
    longest = longest_input(config)
    return number(config, "max_position_embeddings") if longest is None else longest


def eos_ids(config: dict[str, Any], generation_config: dict[str, Any]) -> list[int]:
    """Every id that ends an answer: generation_config.json's, else config.json's."""
    for source in (generation_config, config):
        if (ids := token_ids(source, "eos_token_id")) is not None:
            return ids
    return []


def _check_quantization(config: dict[str, Any], family: Family, quant: str | None) -> None:
    scheme = scheme_of(config)
    if scheme is not None and quant is not None:
        raise UnsupportedArchitecture(
            f"--quant {quant} packs plain weights, and the checkpoint is quantized already ({scheme.method}). Leave "
            "--quant out: it is served at its stored width."
        )
    experts = family.experts
    untried = experts is not None and experts.switch is not None and family.has_experts(config)  # gemma4_text
    untried |= experts is not None and experts.inputs_first  # llama4_text
    untried |= "mamba" in family.roles.values()  # its projections are of unlike parts
    together = experts is not None and experts.together
    if scheme is not None and (untried or (scheme.method == "mxfp4") != together):
        raise UnsupportedArchitecture(
            f"Model type '{config['model_type']}' quantized as {scheme.method} is not supported. Use the unquantized "
            f"checkpoint{', or the one in mxfp4' if together else ''}."
        )


def _check_features(config: dict[str, Any], family: Family) -> None:
    seeing = config.get("use_bidirectional_attention")
    if seeing and seeing != family.bidirectional_images and pooling_of(config) is None:
        raise UnsupportedArchitecture("use_bidirectional_attention is set: an encoder can't generate text.")


def _check_widths(config: dict[str, Any], family: Family, tp: int) -> None:
    """Feed-forward widths are split unevenly where they must be, but every rank needs at least one column."""
    experts = (
        (
            *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
            "moe_shared_expert_intermediate_size",
        )
        if family.experts
        else ()
    )
    widths = {"intermediate_size": family.feed_forward_width(config)}
    for name, width in (widths | {name: config.get(name) for name in experts}).items():
        if isinstance(width, int) and width > config_fields.LARGEST:
            raise ModelFilesError(
                f"config.json has {name} for a width of {width}; at most {config_fields.LARGEST} is served."
            )
        if isinstance(width, int) and width < tp:
            raise UnsupportedArchitecture(f"{name} = {width} can't be divided among {tp} ranks.")


def _check_recurrence(config: dict[str, Any], tp: int) -> None:
    recurrent = recurrence(config)
    if recurrent is None:
        return
    if (width := sum(recurrent.regions)) > config_fields.LARGEST:
        raise ModelFilesError(
            f"config.json has sizes by which a recurrent layer has {width} inner channels; at most "
            f"{config_fields.LARGEST} are served."
        )
    count, unit = recurrent.shared
    if isinstance(recurrent, Mamba):
        recurrent.check_groups(tp)
    if count % tp:
        raise UnsupportedArchitecture(f"{count} {unit} can't be divided among {tp} ranks. {_remedy(count)}")


def _remedy(number: int) -> str:
    return f"Use one of --tp {fitting_ranks(lambda tp: number % tp == 0)}."


def fitting_ranks(fits: Callable[[int], bool]) -> str:
    """The first numbers of ranks that fit, for a remedy."""
    return ", ".join([str(tp) for tp in range(1, MOST_RANKS + 1) if fits(tp)][:8])
