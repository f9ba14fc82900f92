"""Decides from the headers of a GGUF model whether it can be served as asked, before any process is spawned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from control.errors import ModelFilesError, SettingsError, UnsupportedArchitecture
from control.messages import ModelSpec
from worker.families.family import Family
from worker.families.gguf import FACTORS, KEYS_OF_HEADS, RATES, VALUES_OF_HEADS, Gguf, fused_name
from worker.families.recurrence import (
    FEED_FORWARD_ALONE,
    FULL,
    TILED,
    DeltaRule,
    Mamba,
    Recurrence,
    ShortConvolution,
    attends,
    recurs,
)
from worker.native.host import check_host
from worker.repository import validation
from worker.repository.config_fields import fields_of
from worker.repository.gguf.configuration import prediction_layers
from worker.repository.gguf.description import check_described
from worker.weights.formats import StoredTensor
from worker.weights.gguf import FEED_FORWARD, GgufModel, architecture_of
from worker.weights.sharding import ends_at

RECURRENT_OUT = "ssm_out.weight"
_OF_MAMBA = ("ssm_a", "ssm_d", "ssm_norm.weight")
ROW_PARALLEL = ("attn_output.weight", RECURRENT_OUT, "shortconv.out_proj.weight", *FEED_FORWARD)
"""Tensors whose inputs are divided among the ranks."""
_PLAIN_DTYPES = ("auto", "float32")


def check(model: GgufModel, config: dict[str, Any], spec: ModelSpec, devices: Sequence[str]) -> None:
    """Raise ModelFilesError, UnsupportedArchitecture or SettingsError naming file, tensor or value, and the remedy."""
    check_described(model)
    check_tensors(model, config)
    blocked = {name: tensor for name, tensor in model.tensors.items() if tensor.type.blocks is not None}
    if blocked and not spec.dequantize:
        _check_blocks(model, config, spec, devices, blocked)


def check_tensors(model: GgufModel, config: dict[str, Any]) -> None:
    """Every tensor of the configuration is there in its shape, and no other: what is not read would be missing."""
    read_names = {FACTORS}
    for name, shape in _expected(*architecture_of(model), config, model):
        stored = model.tensors.get(name)
        if stored is None:
            raise ModelFilesError(f"{model.files[0]} has no tensor {name}. Download or convert the model again.")
        if stored.shape != shape:
            raise ModelFilesError(
                f"{stored.path}: tensor {name} has the shape {stored.shape}, and by the metadata it is {shape}. "
                "Download or convert the model again."
            )
        if (
            len(shape) == 1 or name.endswith((".bias", "ssm_conv1d.weight", "shortconv.conv.weight", *_OF_MAMBA))
        ) and stored.type.blocks is not None:
            raise ModelFilesError(f"{stored.path}: tensor {name} can't be in blocks ({stored.type.name.upper()}).")
        read_names.add(name)
    first = config["num_hidden_layers"]
    unread = tuple(f"blk.{layer}." for layer in range(first, first + prediction_layers(model)))
    # Files may have keys and values of layers that attend to those of earlier ones.
    shared = [layer for layer in range(first) if validation.shares_keys(config, config, layer)]
    unread += tuple(f"blk.{layer}.attn_{name}" for layer in shared for name in ("k.", "v.", "k_norm."))
    if strange := sorted(name for name in set(model.tensors) - read_names if not name.startswith(unread)):
        raise UnsupportedArchitecture(
            f"{model.files[0]}: {model.architecture} with the tensors {', '.join(strange[:6])} is not supported."
        )


def _check_blocks(
    model: GgufModel,
    config: dict[str, Any],
    spec: ModelSpec,
    devices: Sequence[str],
    blocked: dict[str, StoredTensor],
) -> None:
    name, one = next(iter(blocked.items()))
    about = f"{model.files[0]} keeps its weights in blocks ({name} is {one.type.name.upper()}), which"
    if other_devices := [device for device in devices if not device.startswith("cpu")]:
        raise SettingsError(f"{about} {other_devices[0]} can't compute with. Use --dequantize, or --devices cpu.")
    if spec.quant is not None:
        raise SettingsError(f"{about} --quant {spec.quant} does not pack again. Leave it out, or add --dequantize.")
    if spec.dtype not in _PLAIN_DTYPES:
        raise SettingsError(f"{about} are computed with in float32, not in {spec.dtype}. Use --dequantize.")
    ends = model.borders
    tiles = _value_tiles(config)
    heads = int(config["num_attention_heads"])
    rows = [(tensor, stored) for tensor, stored in blocked.items() if tensor.endswith(ROW_PARALLEL)]
    for tensor, stored in rows:
        if not _fits(tensor, stored, ends, tiles, spec.tp):
            fitting = validation.fitting_ranks(
                lambda tp: heads % tp == 0 and all(_fits(*row, ends, tiles, tp) for row in rows)
            )
            raise SettingsError(
                f"{stored.path}: --tp {spec.tp} would cut blocks of {stored.type.weights} weights of {tensor} ("
                f"{stored.type.name.upper()}, {stored.shape[-1]} wide). Use --tp {fitting} or --dequantize."
            )
    check_host(about.removesuffix(", which"), "Use --dequantize.")


def _value_tiles(config: dict[str, Any]) -> int:
    """The tiles in which the value heads of recurrent layers lie, each with one head for each key head."""
    return config["linear_num_value_heads"] // config["linear_num_key_heads"] if config.get(TILED) else 1


def _fits(name: str, stored: StoredTensor, ends: tuple[int, ...], tiles: int, tp: int) -> bool:
    """True if every rank's share of the inputs ends where a block does. Heads are shared evenly, those of each tile by
    themselves."""
    if name.endswith(RECURRENT_OUT):
        tile = stored.shape[-1] // tiles
        return tp == 1 or (tile % stored.type.weights == 0 and ends_at(tile, stored.type.weights, (), tp))
    return ends_at(stored.shape[-1], stored.type.weights, ends if name.endswith(FEED_FORWARD) else (), tp)


def _expected(
    family: Family, kind: Gguf, config: dict[str, Any], model: GgufModel
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a configuration by their names in the file, with shapes."""
    hidden = config["hidden_size"]
    vocabulary = config["vocab_size"]
    yield "token_embd.weight", (vocabulary, hidden)
    for name, shape in _norm_shapes(family, ("model.norm",), hidden).items():
        yield kind.stored_name(_own_name(family, name)) or "", shape
    if not config["tie_word_embeddings"]:
        yield "output.weight", (vocabulary, hidden)
    if family.biased:
        yield "output.bias", (vocabulary,)
    fields = fields_of(config, family)
    yield from _layer_input_shapes(kind, config, hidden)
    heads = None if family.heads_by_layer is None else family.heads_by_layer(config)
    recurrence = None if family.recurrent is None else family.recurrent(config)
    for layer in range(config["num_hidden_layers"]):
        sparse = family.has_experts(config) and family.experts is not None and family.experts.layers(fields, layer)
        kinds = () if recurrence is None else recurrence.kinds
        kind_of_layer = FULL if recurrence is None else kinds[layer]
        of_layer: dict[str, tuple[int, ...]] = {}
        if recurrence is not None and recurs(kind_of_layer):
            of_layer |= _recurrent_shapes(config, recurrence)
        if attends(kind_of_layer):
            of_layer |= _attention_shapes(config if heads is None else {**config, **heads[layer]}, family, fields)
            for name in _keys_of_others(config, family, fields, layer):
                of_layer.pop(f"self_attn.{name}.weight", None)
        if FEED_FORWARD_ALONE not in kinds or kind_of_layer == FEED_FORWARD_ALONE:
            of_layer |= _feed_forward_shapes(config, family, fields, layer, sparse)
        if sparse and family.experts is not None and family.experts.beside is not None:
            of_layer |= _shapes_beside(config, family, fields, layer)
        of_layer |= _norm_shapes(family, family.norms, hidden)
        if width := fields.get("hidden_size_per_layer_input"):
            of_layer |= {
                "per_layer_input_gate.weight": (width, hidden),
                "per_layer_projection.weight": (hidden, width),
                "post_per_layer_input_norm.weight": (hidden,),
            }
        if family.layer_scales:
            of_layer["layer_scalar"] = (1,)
        for inner, shape in of_layer.items():
            own_name = _own_name(family, f"model.layers.{layer}.{inner}")
            for half in kind.halves.get(own_name.removeprefix(f"model.layers.{layer}."), ()):
                yield f"blk.{layer}.{half}", (shape[0] // 2, *shape[1:])
            name = kind.stored_name(own_name)
            if name is not None:
                stored = model.tensors.get(name)
                # The gate of a shared expert may be stored as a matrix of one row.
                flat = inner == _SHARED_GATE and stored is not None and len(stored.shape) == 1
                yield _held(name, shape[1:] if flat else shape, model)


def _keys_of_others(config: dict[str, Any], family: Family, fields: dict[str, Any], layer: int) -> tuple[str, ...]:
    """Modules that a layer's attention lacks: an earlier layer has its keys and values, or its keys are the values."""
    if validation.shares_keys(config, fields, layer):
        return "k_proj", "v_proj", "k_norm"
    kinds = [] if family.layer_kinds is None else family.layer_kinds(config)
    return ("v_proj",) if kinds and family.keys_are_values(fields, kinds[layer]) else ()


def _layer_input_shapes(kind: Gguf, config: dict[str, Any], hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of the layers' own inputs that are in no layer."""
    width = config.get("hidden_size_per_layer_input")
    if width:
        every = config["num_hidden_layers"] * width
        shapes = {
            "embed_tokens_per_layer": (config["vocab_size_per_layer_input"], every),
            "per_layer_model_projection": (every, hidden),
            "per_layer_projection_norm": (width,),
        }
        yield from ((kind.stored_name(f"model.{name}.weight") or "", shape) for name, shape in shapes.items())


def _shapes_beside(
    config: dict[str, Any], family: Family, fields: dict[str, Any], layer: int
) -> dict[str, tuple[int, ...]]:
    """Of a layer whose experts are beside a feed-forward network: that network, and the router and norms of experts."""
    assert family.experts is not None and family.experts.beside is not None
    hidden = config["hidden_size"]
    count = fields[family.experts.count]
    router = family.experts.router
    return {
        **_feed_forward_shapes(config, family, fields, layer, sparse=False),
        **{f"{name}.weight": (hidden,) for name in family.experts.beside},
        f"{router}.proj.weight": (count, hidden),
        f"{router}.scale": (hidden,),
        f"{router}.per_expert_scale": (count,),
    }


def _own_name(family: Family, name: str) -> str:
    """The name that published files of the type have for a parameter."""
    for usual, own_name in (*family.native_names, *family.stored_names):
        name = name.replace(usual, own_name)
    return name


def _held(name: str, shape: tuple[int, ...], model: GgufModel) -> tuple[str, tuple[int, ...]]:
    """The tensor that has the rows of `name`, and its shape: another one where two are one tensor."""
    if name.endswith(RATES):
        return name, (2 * shape[0], *shape[1:])
    fused = fused_name(name)
    if fused is None or name in model.tensors or fused[0] not in model.tensors:
        return name, shape
    return fused[0], (shape[0], 2 * shape[1], *shape[2:])


_SHARED_GATE = "mlp.shared_expert_gate.weight"


def _attention_shapes(config: dict[str, Any], family: Family, fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer's attention by transformers' names, and biases of its feed-forward network; `stored_name`
    drops those that an architecture does not have. `fields`: as `fields_of`."""
    hidden = config["hidden_size"]
    width = config["head_dim"]
    query = config["num_attention_heads"] * width
    shared = config["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (2 * query if family.output_gate else query, hidden),
        "self_attn.k_proj.weight": (shared, hidden),
        "self_attn.v_proj.weight": (shared, hidden),
        "self_attn.qkv_proj.weight": (query + 2 * shared, hidden),
        "self_attn.o_proj.weight": (hidden, query),
    }
    if family.latent:
        for name in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
            del shapes[f"self_attn.{name}.weight"]
        shapes |= _latent_shapes(config, fields)
    if family.head_norms is not None:
        heads = (config["num_attention_heads"], config["num_key_value_heads"])
        each: dict[str, tuple[tuple[int, ...], ...]] = {
            "all_heads": ((query,), (shared,)),
            "each_own_head": tuple((count, width) for count in heads),
        }
        sizes = each.get(family.head_norms, ((width,), (width,)))
        if family.head_norm_switch is None or config.get(family.head_norm_switch):
            names = family.head_norm_names
            shapes |= {f"self_attn.{norm}.weight": size for norm, size in zip(names, sizes, strict=True)}
    biased = ("q", "k", "v") if family.query_key_value_bias else ()
    if family.experts is not None and family.experts.together:
        count = config["num_local_experts"]
        inner = config["intermediate_size"]
        shapes |= {
            "self_attn.sinks": (config["num_attention_heads"],),
            "mlp.router.weight": (count, hidden),
            "mlp.router.bias": (count,),
            "mlp.experts.gate_proj.bias": (count, inner),
            "mlp.experts.up_proj.bias": (count, inner),
            "mlp.experts.down_proj.bias": (count, hidden),
        }
    if config.get("attention_bias") or family.biased:
        has_output_bias = family.output_bias and config.get("attention_out_bias", True)
        biased = ("q", "k", "v", "o") if has_output_bias else ("q", "k", "v")
    if family.latent and config.get("attention_bias"):
        biased = ()
        names = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
        shapes_by_name = {name: shapes.get(f"self_attn.{name}.weight") for name in names}
        shapes |= {f"self_attn.{name}.bias": shape[:1] for name, shape in shapes_by_name.items() if shape is not None}
    shapes |= {
        f"self_attn.{projection}_proj.bias": shapes[f"self_attn.{projection}_proj.weight"][:1] for projection in biased
    }
    if config.get("mlp_bias") or family.biased:
        inner = config["intermediate_size"]
        shapes |= {f"mlp.{projection}_proj.bias": (inner,) for projection in ("gate", "up")} | {
            "mlp.down_proj.bias": (hidden,)
        }
    return shapes


def _recurrent_shapes(config: dict[str, Any], recurrence: Recurrence) -> dict[str, tuple[int, ...]]:
    """The tensors of what a recurrent layer has instead of attention, as `_attention_shapes`."""
    hidden = config["hidden_size"]
    if isinstance(recurrence, ShortConvolution):
        return {
            "conv.in_proj.weight": (3 * hidden, hidden),
            "conv.conv.weight": (hidden, recurrence.taps),
            "conv.out_proj.weight": (hidden, hidden),
        }
    if isinstance(recurrence, Mamba):
        return _mamba_shapes(hidden, recurrence)
    assert isinstance(recurrence, DeltaRule)
    heads = recurrence.value_heads
    values = heads * recurrence.value_dim
    channels = sum(recurrence.regions)
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (channels, recurrence.taps),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (recurrence.value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _mamba_shapes(hidden: int, mamba: Mamba) -> dict[str, tuple[int, ...]]:
    heads = mamba.heads
    inner = mamba.heads * mamba.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "mamba.in_proj.weight": (sum(mamba.regions), hidden),
        "mamba.conv1d.weight": (mamba.channels(1), mamba.taps),
        "mamba.A_log": (heads, 1),
        "mamba.D": (heads, 1),
        "mamba.dt_bias": (heads,),
        "mamba.out_proj.weight": (hidden, inner),
    }
    if mamba.conv_bias:
        shapes["mamba.conv1d.bias"] = (mamba.channels(1),)
    if mamba.norm is not None:
        shapes["mamba.norm.weight"] = (mamba.groups, inner // mamba.groups)
    return shapes


def _latent_shapes(config: dict[str, Any], fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of attention over compressed keys and values. Each head has a matrix of keys and one of values."""
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    rank = fields["kv_lora_rank"]
    query_rank = fields["q_lora_rank"]
    plain = fields["qk_nope_head_dim"]
    turned = fields["qk_rope_head_dim"]
    value = fields["v_head_dim"]
    queries = heads * (plain + turned)
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + turned, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        f"self_attn.{KEYS_OF_HEADS}.weight": (heads, rank, plain),
        f"self_attn.{VALUES_OF_HEADS}.weight": (heads, value, rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    if query_rank is None:
        return shapes | {"self_attn.q_proj.weight": (queries, hidden)}
    return shapes | {
        "self_attn.q_a_proj.weight": (query_rank, hidden),
        "self_attn.q_a_layernorm.weight": (query_rank,),
        "self_attn.q_b_proj.weight": (queries, query_rank),
    }


def _norm_shapes(family: Family, norms: Iterable[str | None], hidden: int) -> dict[str, tuple[int, ...]]:
    leaves = ("weight", "bias") if family.norm_kind == "layer_with_bias" else ("weight",)
    return {f"{norm}.{leaf}": (hidden,) for norm in norms if norm is not None for leaf in leaves}


def _gated_shapes(module: str, inner: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """A feed-forward network with a gate. Files have gate and up by themselves, or both in one."""
    return {
        f"{module}.gate_proj.weight": (inner, hidden),
        f"{module}.up_proj.weight": (inner, hidden),
        f"{module}.gate_up_proj.weight": (2 * inner, hidden),
        f"{module}.down_proj.weight": (hidden, inner),
    }


def _feed_forward_shapes(
    config: dict[str, Any], family: Family, fields: dict[str, Any], layer: int, sparse: bool
) -> dict[str, tuple[int, ...]]:
    """Matrices of a layer's feed-forward, or of all its experts."""
    hidden = config["hidden_size"]
    experts = family.experts
    if not sparse or experts is None:
        inner = fields.get("shared_intermediate_size") or family.feed_forward_width({**config, **fields})
        assert inner is not None
        if validation.is_double_wide(config, fields, layer):
            inner *= 2
        return _gated_shapes("mlp", inner, hidden)
    count = fields[experts.count]
    inner = fields.get("moe_intermediate_size", config["intermediate_size"])
    sizes = ((count, inner, hidden), (count, inner, hidden), (count, hidden, inner))
    shapes: dict[str, tuple[int, ...]] = {
        name.replace(".{}.", "."): size for name, size in zip(experts.tensors, sizes, strict=True) if name
    }
    if experts.correction is not None and fields.get(experts.correction_switch or "", True):
        owner = "mlp" if experts.correction == "mixture" else "mlp.gate"
        shapes[f"{owner}.e_score_correction_bias"] = (count,)
    if experts.correction == "statics":
        del shapes["mlp.gate.e_score_correction_bias"]
        shapes["mlp.gate.moe_statics.e_score_correction_bias"] = (1, count)
    if "mlp.shared_experts.down_proj" in family.natively_named().roles:
        every = fields.get("moe_shared_expert_intermediate_size", inner * fields.get(experts.shared, 1))
        shapes |= _gated_shapes("mlp.shared_experts", fields.get("shared_intermediate_size", every), hidden)
    if (shared := config.get("shared_expert_intermediate_size")) is not None:
        shapes |= _gated_shapes("mlp.shared_expert", shared, hidden)
        shapes[_SHARED_GATE] = (1, hidden)
    return shapes | {f"mlp.{experts.router}.weight": (count, hidden)}
