"""Meta models of the families whose forward is C++: modules with transformers' names and no forward of their own.

They hold what the loader fills and `Plan` reads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from worker.families.family import Family, Roles
from worker.families.recurrence import FEED_FORWARD_ALONE, Mamba, attends, recurs
from worker.families.registry import FAMILIES
from worker.models.native.config import Latent
from worker.models.native.linear import Embedding
from worker.models.native.module import Module, Numbers, Unfilled
from worker.models.native.rotary import Rotary, rotaries
from worker.native.library import XIELU

CORRECTION = "e_score_correction_bias"
"""The numbers, of a mixture or of its router, that are added to scores for the choice of experts."""
LAYERS_TABLE = "embed_tokens_per_layer"
"""The name of the embedding that gives each layer an input of its own, in the body of models that have it."""


def native_meta_model(config: SimpleNamespace, config_json: dict[str, Any]) -> CausalModel:
    """The model of `config`, its parameters unfilled. Raises NotNative for a rotary embedding that is left to
    transformers."""
    family = FAMILIES[config.model_type]
    widths = {
        kind: layer_config.head_dim
        for kind, layer_config in zip(config.layer_types, config.per_layer_config, strict=True)
    }
    turned = config.latent.turned if config.latent else config.head_dim
    return CausalModel(config, rotaries(config_json, family, turned, widths))


class CausalModel(Module):
    """Embedding, layers, last norm and head."""

    def __init__(self, config: SimpleNamespace, rotary_embeddings: dict[str, Rotary]) -> None:
        self.config = config
        self.model = _Body(config, rotary_embeddings)
        self.lm_head: Module = Linear(config.hidden_size, config.vocab_size, config.head_bias)

    @property
    def family(self) -> Family:
        """The type's record, with the names of these modules."""
        return FAMILIES[self.config.model_type].natively_named()

    def offset_norms(self) -> None:
        """Add one to the weights of all norms, which were loaded, of a family that has them so."""
        if FAMILIES[self.config.model_type].norm_offset:
            for _, norm in self.modules():
                if isinstance(norm, Norm) and not norm.centered:
                    assert not isinstance(norm.weight, Unfilled)
                    norm.weight = 1.0 + norm.weight


class _Body(Module):
    def __init__(self, config: SimpleNamespace, rotary_embeddings: dict[str, Rotary]) -> None:
        self.rotaries = rotary_embeddings
        self.embed_tokens: Module = _embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.layers = [_Layer(config, layer) for layer in range(config.num_hidden_layers)]
        self.norm = _norm(config, config.hidden_size)
        if width := config.hidden_size_per_layer_input:
            all_layers = config.num_hidden_layers * width
            self.embed_tokens_per_layer: Module = _embedding(config.vocab_size_per_layer_input, all_layers, width**0.5)
            self.per_layer_model_projection = Linear(config.hidden_size, all_layers, False)
            self.per_layer_projection_norm = _norm(config, width)
        if config.alternation is not None:
            further = range(1, config.alternation.streams)
            self.altup_projections = _Several([Linear(config.hidden_size, config.hidden_size, False) for _ in further])
            self.altup_unembed_projections = _Several(
                [Linear(config.hidden_size, config.hidden_size, False) for _ in further]
            )


class _Layer(Module):
    def __init__(self, config: SimpleNamespace, layer: int) -> None:
        family = FAMILIES[config.model_type]
        roles = family.natively_named().roles
        norms = config.norms
        kind = config.layer_types[layer]
        if recurs(kind):
            if "conv.in_proj" in roles:
                self.conv = _Convolution(config)
            elif "mamba.in_proj" in roles:
                self.mamba = _Mamba(config)
            else:
                self.linear_attn = _Recurrent(config, roles)
        if attends(kind):
            self.self_attn = _Attention(config, roles, layer) if config.latent is None else _LatentAttention(config)
        sparse = layer in getattr(config, "expert_layers", ())
        if sparse and family.experts is not None and family.experts.beside is not None:
            norms = (*norms, *family.experts.beside)
            _add_experts(self, config)
            sparse = False
        if kind == FEED_FORWARD_ALONE or FEED_FORWARD_ALONE not in config.layer_types:
            inner = config.feed_forward_widths[layer]
            self.mlp = _Mixture(config, roles) if sparse else _FeedForward(config, roles, inner)
        for name in norms:
            if name is not None:
                setattr(self, name, _norm(config, config.hidden_size))
        if width := config.hidden_size_per_layer_input:
            self.per_layer_input_gate = Linear(config.hidden_size, width, False)
            self.per_layer_projection = Linear(width, config.hidden_size, False)
            self.post_per_layer_input_norm = _norm(config, config.hidden_size)
        if family.layer_scales:
            self.layer_scalar = _unfilled(1)
        if config.alternation is not None:
            self.altup = _Alternation(config)
            self.laurel = _LowRank(config)


class _Several(Module):
    """Parts whose names are numbers."""

    def __init__(self, parts: list[Module]) -> None:
        for number, part in enumerate(parts):
            setattr(self, str(number), part)


class _Alternation(Module):
    def __init__(self, config: SimpleNamespace) -> None:
        streams = config.alternation.streams
        self.correct_output_scale = _unfilled(config.hidden_size)
        self.correction_coefs = Linear(streams, streams, False)
        self.prediction_coefs = Linear(streams, streams * streams, False)
        self.modality_router = Linear(config.hidden_size, streams, False)
        self.router_norm = _norm(config, config.hidden_size)


class _LowRank(Module):
    def __init__(self, config: SimpleNamespace) -> None:
        self.linear_left = Linear(config.hidden_size, config.alternation.rank, False)
        self.linear_right = Linear(config.alternation.rank, config.hidden_size, False)
        self.post_laurel_norm = _norm(config, config.hidden_size)


class _Attention(Module):
    def __init__(self, config: SimpleNamespace, roles: Roles, layer: int) -> None:
        family = FAMILIES[config.model_type]
        hidden = config.hidden_size
        layer_config = config.per_layer_config[layer]
        width = layer_config.head_dim
        shared_heads = layer_config.num_key_value_heads
        queries = config.num_attention_heads * width
        shared = shared_heads * width
        value_width = config.v_head_dim or width
        has_keys = config.kv_sharing_modes[layer] != "reuse"
        if "self_attn.qkv_proj" in roles:
            self.qkv_proj = Linear(hidden, queries + 2 * shared, config.query_key_value_bias)
        else:
            self.q_proj = Linear(hidden, (1 + family.output_gate) * queries, config.query_key_value_bias)
            if has_keys:
                self.k_proj = Linear(hidden, shared, config.query_key_value_bias)
            if has_keys and not config.keys_are_values[layer]:
                self.v_proj = Linear(hidden, shared_heads * value_width, config.query_key_value_bias)
            if config.head_gates:
                self.g_proj = Linear(hidden, config.num_attention_heads, False)
        self.o_proj = Linear(config.num_attention_heads * value_width, hidden, config.output_bias)
        if config.head_norms is not None:
            shapes = {
                "all_heads": ((queries,), (shared,)),
                "each_own_head": ((config.num_attention_heads, width), (shared_heads, width)),
            }
            for name, shape in zip(
                family.head_norm_names, shapes.get(config.head_norms, ((width,), (width,))), strict=True
            ):
                if has_keys or name == family.head_norm_names[0]:
                    setattr(self, name, _norm(config, *shape))
        if "self_attn.sinks" in roles and family.has_sinks(config.layer_types[layer]):
            self.sinks = _unfilled(config.num_attention_heads)


LATENT_EPSILON = 1e-6
"""Of the norms within attention over compressed keys and values, whatever the model's others have."""


class _LatentAttention(Module):
    def __init__(self, config: SimpleNamespace) -> None:
        hidden = config.hidden_size
        heads = config.num_attention_heads
        widths: Latent = config.latent
        bias = config.output_bias
        outputs = heads * (widths.plain + widths.turned)
        if widths.query_rank:
            self.q_a_proj = Linear(hidden, widths.query_rank, bias)
            self.q_a_layernorm = Norm(_unfilled(widths.query_rank), LATENT_EPSILON)
            self.q_b_proj = Linear(widths.query_rank, outputs, False)
        else:
            self.q_proj = Linear(hidden, outputs, False)
        self.kv_a_proj_with_mqa = Linear(hidden, widths.rank + widths.turned, bias)
        self.kv_a_layernorm = Norm(_unfilled(widths.rank), LATENT_EPSILON)
        self.kv_b_proj: Module = LatentWeights(heads, widths)
        self.o_proj = Linear(heads * widths.value_dim, hidden, bias)


class LatentWeights(Module):
    """The shape of the matrices of all heads' keys and values. The loader replaces it by packed ones of each head."""

    def __init__(self, heads: int, widths: Latent) -> None:
        self.widths = widths
        self.weight = _unfilled(heads * (widths.plain + widths.value_dim), widths.rank)


class _FeedForward(Module):
    """A feed-forward network, or an expert that every token goes through: `name` is its own in the roles."""

    def __init__(self, config: SimpleNamespace, roles: Roles, inner: int, name: str = "mlp") -> None:
        hidden = config.hidden_size
        bias = config.feed_forward_bias
        if f"{name}.gate_up_proj" in roles:
            self.gate_up_proj = Linear(hidden, 2 * inner, bias)
        else:
            if f"{name}.gate_proj" in roles:
                self.gate_proj = Linear(hidden, inner, bias)
            self.up_proj = Linear(hidden, inner, bias)
        self.down_proj = Linear(inner, hidden, bias)
        if config.activation == XIELU:
            self.act_fn = _Xielu()


class _Xielu(Module):
    """The learned numbers of an activation, and those that files have as constants."""

    def __init__(self) -> None:
        self.alpha_p = _unfilled(1)
        self.alpha_n = _unfilled(1)
        self.beta = _unfilled()
        self.eps = _unfilled()


def _add_experts(to: Any, config: SimpleNamespace) -> None:
    """Give the module `to` experts and their router."""
    experts = FAMILIES[config.model_type].experts
    assert experts is not None
    if experts.router_scales:
        router: Any = _ScaledRouter(config)
    else:
        router = _Weights(config.num_experts, config.hidden_size, bias=config.clamp is not None)
    setattr(to, experts.router, router)
    if config.expert_correction == "statics":
        router.moe_statics = _Statics(config)
    elif config.expert_correction is not None:
        owner = router if config.expert_correction == "router" else to
        setattr(owner, CORRECTION, _unfilled(config.num_experts))
    to.experts = _Experts(config)


class _ScaledRouter(Module):
    """A router whose input is normed and scaled, with a scale of each expert's weight."""

    def __init__(self, config: SimpleNamespace) -> None:
        self.proj = _Weights(config.num_experts, config.hidden_size)
        self.scale = _unfilled(config.hidden_size)
        self.per_expert_scale = _unfilled(config.num_experts)


class _Statics(Module):
    def __init__(self, config: SimpleNamespace) -> None:
        self.e_score_correction_bias = _unfilled(1, config.num_experts)


class _Mixture(Module):
    experts: Module

    def __init__(self, config: SimpleNamespace, roles: Roles) -> None:
        _add_experts(self, config)
        if "mlp.shared_expert.up_proj" in roles:
            inner = config.shared_expert_intermediate_size
            self.shared_expert = _FeedForward(config, roles, inner, "mlp.shared_expert")
            self.shared_expert_gate = Linear(config.hidden_size, 1, False)
        if "mlp.shared_experts.down_proj" in roles:
            inner = config.shared_expert_intermediate_size
            self.shared_experts = _FeedForward(config, roles, inner, "mlp.shared_experts")


class _Experts(Module):
    """The shapes of a layer's experts, which the loader replaces by packed ones."""

    def __init__(self, config: SimpleNamespace) -> None:
        count = config.num_experts
        hidden = config.hidden_size
        inner = config.moe_intermediate_size
        family = FAMILIES[config.model_type]
        if config.clamp is not None or (family.experts is not None and family.experts.inputs_first):
            self.gate_up_proj = _unfilled(count, hidden, 2 * inner)
            self.down_proj = _unfilled(count, inner, hidden)
        else:
            if family.is_gated:
                self.gate_up_proj = _unfilled(count, 2 * inner, hidden)
            else:
                self.up_proj = _unfilled(count, inner, hidden)
            self.down_proj = _unfilled(count, hidden, inner)
        if config.clamp is not None:
            self.gate_up_proj_bias = _unfilled(count, 2 * inner)
            self.down_proj_bias = _unfilled(count, hidden)


class _Recurrent(Module):
    def __init__(self, config: SimpleNamespace, roles: Roles) -> None:
        hidden = config.hidden_size
        heads = config.linear_num_value_heads
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = heads * config.linear_value_head_dim
        if "linear_attn.in_proj_qkvz" in roles:
            projections = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
        else:
            projections = {
                "in_proj_qkv": 2 * keys + values,
                "in_proj_z": values,
                "in_proj_b": heads,
                "in_proj_a": heads,
            }
        for name, outputs in projections.items():
            setattr(self, name, Linear(hidden, outputs, False))
        self.conv1d = _Weights(2 * keys + values, 1, config.linear_conv_kernel_dim)
        self.dt_bias = _unfilled(heads)
        self.A_log = _unfilled(heads)
        self.norm = _Weights(config.linear_value_head_dim)
        self.out_proj = Linear(values, hidden, False)


class _Convolution(Module):
    def __init__(self, config: SimpleNamespace) -> None:
        hidden = config.hidden_size
        bias = config.conv_bias
        self.in_proj = Linear(hidden, 3 * hidden, bias)
        self.conv = _Weights(hidden, 1, config.conv_L_cache, bias=bias)
        self.out_proj = Linear(hidden, hidden, bias)


class _Mamba(Module):
    def __init__(self, config: SimpleNamespace) -> None:
        shape: Mamba = config.mamba
        inner = shape.heads * shape.head_dim
        hidden = config.hidden_size
        self.in_proj = Linear(hidden, sum(shape.regions), shape.in_bias)
        self.conv1d = _Weights(shape.channels(1), 1, shape.taps, bias=shape.conv_bias)
        self.dt_bias, self.A_log, self.D = (_unfilled(shape.heads) for _ in range(3))
        if shape.norm is not None:
            self.norm = _Weights(inner)
        self.out_proj = Linear(inner, hidden, shape.out_bias)


class _Weights(Module):
    """A module that only holds a weight of some shape, and a bias of as many outputs."""

    def __init__(self, *shape: int, bias: bool = False) -> None:
        self.weight = _unfilled(*shape)
        if bias:
            self.bias = _unfilled(shape[0])


class Norm(Module):
    """x / sqrt(mean(x²) + ε) · weight over the last dimension in float32; where it is `centered`,
    (x - mean(x)) / sqrt(variance(x) + ε) · weight + bias. The bias may be None."""

    def __init__(self, weight: Numbers, eps: float, centered: bool = False, bias: Numbers | None = None) -> None:
        self.weight = weight
        self.eps = eps
        self.centered = centered
        self.bias = bias


class Linear(Module):
    """The shapes of a linear layer, which the loader replaces by a packed one."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        self.weight: Numbers = _unfilled(outputs, inputs)
        self.bias: Numbers | None = _unfilled(outputs) if bias else None


def _norm(config: SimpleNamespace, *shape: int) -> Norm:
    kind = FAMILIES[config.model_type].norm_kind
    if kind == "rms":
        return Norm(_unfilled(*shape), config.rms_norm_eps)
    bias = _unfilled(*shape) if kind == "layer_with_bias" else None
    return Norm(_unfilled(*shape), config.rms_norm_eps, centered=True, bias=bias)


def _unfilled(*shape: int) -> Any:
    return Unfilled(shape)


def _embedding(rows: int, width: int, scale: float | None) -> Embedding:
    return Embedding(_unfilled(rows, width), scale)
