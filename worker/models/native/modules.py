"""Meta models of the families whose forward is C++: modules with transformers' names and no forward of their own.

They hold what the weight loader fills and `Plan` reads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from worker.families.family import Family
from worker.families.mamba import Mamba
from worker.families.recurrence import LINEAR
from worker.families.registry import FAMILIES
from worker.families.roles import Roles
from worker.models.layers.norms import FusedRMSNorm
from worker.models.native.mixtures import CORRECTION
from worker.models.native.rotary import Rotary, rotaries
from worker.native.library import XIELU

META = torch.device("meta")


def native_meta_model(config: SimpleNamespace, config_json: dict[str, Any]) -> CausalModel:
    """The model of `config`, every parameter on the meta device. Raises NotNative for a rotary embedding that is left
    to transformers."""
    family = FAMILIES[config.model_type]
    widths = {kind: own.head_dim for kind, own in zip(config.layer_types, config.per_layer_config, strict=True)}
    return CausalModel(config, rotaries(config_json, family, config.head_dim, widths)).eval()


class CausalModel(nn.Module):
    """Embedding, layers, last norm and head."""

    def __init__(self, config: SimpleNamespace, rotary_embeddings: dict[str, Rotary]) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config, rotary_embeddings)
        self.lm_head: nn.Module = _linear(config.hidden_size, config.vocab_size, config.head_bias)

    @property
    def family(self) -> Family:
        """The type's record, with the names of these modules."""
        return FAMILIES[self.config.model_type].natively_named()

    @property
    def base_model(self) -> nn.Module:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, embedding: nn.Module) -> None:
        self.model.embed_tokens = embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head

    def offset_norms(self) -> None:
        """Add one to the weights of all norms, which were loaded, of a family that has them so."""
        if FAMILIES[self.config.model_type].norm_offset:
            for norm in self.modules():
                if isinstance(norm, FusedRMSNorm) and norm.weight is not None:
                    norm.weight = nn.Parameter(1.0 + norm.weight, requires_grad=False)


class _Body(nn.Module):
    def __init__(self, config: SimpleNamespace, rotary_embeddings: dict[str, Rotary]) -> None:
        super().__init__()
        self.rotaries = rotary_embeddings
        self.embed_tokens: nn.Module = _embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.layers = nn.ModuleList(_Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = _norm(config, config.hidden_size)
        if width := config.hidden_size_per_layer_input:
            all_layers = config.num_hidden_layers * width
            self.embed_tokens_per_layer: nn.Module = _embedding(
                config.vocab_size_per_layer_input, all_layers, width**0.5
            )
            self.per_layer_model_projection = _linear(config.hidden_size, all_layers, False)
            self.per_layer_projection_norm = _norm(config, width)


class _Layer(nn.Module):
    def __init__(self, config: SimpleNamespace, layer: int) -> None:
        super().__init__()
        family = FAMILIES[config.model_type]
        roles, norms = family.natively_named().roles, family.norms
        if config.layer_types[layer] == LINEAR:
            if "conv.in_proj" in roles:
                self.conv = _Convolution(config)
            elif "mamba.in_proj" in roles:
                self.mamba = _Mamba(config)
            else:
                self.linear_attn = _Recurrent(config, roles)
        else:
            self.self_attn = _Attention(config, roles, layer)
        sparse = layer in getattr(config, "expert_layers", ())
        if sparse and family.experts is not None and family.experts.beside is not None:
            norms = (*norms, *family.experts.beside)
            _add_experts(self, config)
            sparse = False
        self.mlp = _Mixture(config, roles) if sparse else _FeedForward(config, roles, config.feed_forward_widths[layer])
        for name in norms:
            if name is not None:
                setattr(self, name, _norm(config, config.hidden_size))
        if width := config.hidden_size_per_layer_input:
            self.per_layer_input_gate = _linear(config.hidden_size, width, False)
            self.per_layer_projection = _linear(width, config.hidden_size, False)
            self.post_per_layer_input_norm = _norm(config, config.hidden_size)
        if family.layer_scales:
            self.register_buffer("layer_scalar", torch.ones(1))


class _Attention(nn.Module):
    def __init__(self, config: SimpleNamespace, roles: Roles, layer: int) -> None:
        super().__init__()
        family, hidden, own = FAMILIES[config.model_type], config.hidden_size, config.per_layer_config[layer]
        width, shared_heads = own.head_dim, own.num_key_value_heads
        queries, shared = config.num_attention_heads * width, shared_heads * width
        has_keys = config.kv_sharing_modes[layer] != "reuse"
        if "self_attn.qkv_proj" in roles:
            self.qkv_proj = _linear(hidden, queries + 2 * shared, config.query_key_value_bias)
        else:
            self.q_proj = _linear(hidden, (1 + family.output_gate) * queries, config.query_key_value_bias)
            if has_keys:
                self.k_proj = _linear(hidden, shared, config.query_key_value_bias)
            if has_keys and not config.keys_are_values[layer]:
                self.v_proj = _linear(hidden, shared, config.query_key_value_bias)
        self.o_proj = _linear(queries, hidden, config.output_bias)
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
        if "self_attn.sinks" in roles:
            self.sinks = _parameter(config.num_attention_heads)


class _FeedForward(nn.Module):
    """A feed-forward network, or an expert that every token goes through: `name` is its own in the roles."""

    def __init__(self, config: SimpleNamespace, roles: Roles, inner: int, name: str = "mlp") -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.feed_forward_bias
        if f"{name}.gate_up_proj" in roles:
            self.gate_up_proj = _linear(hidden, 2 * inner, bias)
        else:
            if f"{name}.gate_proj" in roles:
                self.gate_proj = _linear(hidden, inner, bias)
            self.up_proj = _linear(hidden, inner, bias)
        self.down_proj = _linear(inner, hidden, bias)
        if config.activation == XIELU:
            self.act_fn = _Xielu()


class _Xielu(nn.Module):
    """The learned numbers of an activation, and those that files have as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = _parameter(1), _parameter(1)
        self.register_buffer("beta", torch.tensor(0.0))
        self.register_buffer("eps", torch.tensor(0.0))


def _add_experts(to: nn.Module, config: SimpleNamespace) -> None:
    """Give the module `to` experts and their router."""
    experts = FAMILIES[config.model_type].experts
    assert experts is not None
    if experts.router_scales:
        router: nn.Module = _ScaledRouter(config)
    else:
        router = _Weights(config.num_experts, config.hidden_size, bias=config.clamp is not None)
    setattr(to, experts.router, router)
    if experts.correction is not None:
        owner = router if experts.correction == "router" else to
        owner.register_buffer(CORRECTION, torch.zeros(config.num_experts))
    to.experts = _Experts(config)


class _ScaledRouter(nn.Module):
    """A router whose input is normed and scaled, with a scale of each expert's weight."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.proj = _Weights(config.num_experts, config.hidden_size)
        self.scale, self.per_expert_scale = _parameter(config.hidden_size), _parameter(config.num_experts)


class _Mixture(nn.Module):
    experts: nn.Module

    def __init__(self, config: SimpleNamespace, roles: Roles) -> None:
        super().__init__()
        _add_experts(self, config)
        if "mlp.shared_expert.up_proj" in roles:
            inner = config.shared_expert_intermediate_size
            self.shared_expert = _FeedForward(config, roles, inner, "mlp.shared_expert")
            self.shared_expert_gate = _linear(config.hidden_size, 1, False)
        if "mlp.shared_experts.down_proj" in roles:
            inner = config.shared_expert_intermediate_size
            self.shared_experts = _FeedForward(config, roles, inner, "mlp.shared_experts")


class _Experts(nn.Module):
    """The shapes of a layer's experts, which the loader replaces by packed ones."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        count, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        if config.clamp is None:
            self.gate_up_proj, self.down_proj = _parameter(count, 2 * inner, hidden), _parameter(count, hidden, inner)
        else:
            self.gate_up_proj, self.down_proj = _parameter(count, hidden, 2 * inner), _parameter(count, inner, hidden)
            self.gate_up_proj_bias, self.down_proj_bias = _parameter(count, 2 * inner), _parameter(count, hidden)


class _Recurrent(nn.Module):
    def __init__(self, config: SimpleNamespace, roles: Roles) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.linear_num_value_heads
        keys, values = config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
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
            setattr(self, name, _linear(hidden, outputs, False))
        self.conv1d = _Weights(2 * keys + values, 1, config.linear_conv_kernel_dim)
        self.dt_bias, self.A_log = _parameter(heads), _parameter(heads)
        self.norm = _Weights(config.linear_value_head_dim)
        self.out_proj = _linear(values, hidden, False)


class _Convolution(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.conv_bias
        self.in_proj = _linear(hidden, 3 * hidden, bias)
        self.conv = _Weights(hidden, 1, config.conv_L_cache, bias=bias)
        self.out_proj = _linear(hidden, hidden, bias)


class _Mamba(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        shape: Mamba = config.mamba
        inner, hidden, bias = shape.heads * shape.head_dim, config.hidden_size, config.proj_bias
        self.in_proj = _linear(hidden, sum(shape.regions), bias)
        self.conv1d = _Weights(shape.channels(1), 1, shape.taps, bias=config.conv_bias)
        self.dt_bias, self.A_log, self.D = (_parameter(shape.heads) for _ in range(3))
        self.norm = _Weights(inner)
        self.out_proj = _linear(inner, hidden, bias)


class _Weights(nn.Module):
    """A module that only holds a weight of some shape, and a bias of as many outputs."""

    def __init__(self, *shape: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = _parameter(*shape)
        if bias:
            self.bias = _parameter(shape[0])


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(variance(x) + ε) · weight + bias over the last dimension. The bias may be None."""

    bias: Tensor | None

    def __init__(self, shape: tuple[int, ...], eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = _parameter(*shape)
        self.register_parameter("bias", _parameter(*shape) if bias else None)
        self.eps = eps


class ScaledEmbedding(nn.Embedding):
    """ids (…) → rows (…, hidden), multiplied by `embed_scale`, which is transformers' name."""

    embed_scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale


def _norm(config: SimpleNamespace, *shape: int) -> nn.Module:
    kind = FAMILIES[config.model_type].norm_kind
    if kind == "rms":
        return FusedRMSNorm(torch.empty(shape, device=META), config.rms_norm_eps)
    return LayerNorm(shape, config.rms_norm_eps, bias=kind == "layer_with_bias")


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=META), requires_grad=False)


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A linear layer without its initialisation, for which torch would import its compiler."""
    linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.in_features, linear.out_features = inputs, outputs
    linear.weight = _parameter(outputs, inputs)
    linear.register_parameter("bias", _parameter(outputs) if bias else None)
    return linear


def _embedding(rows: int, width: int, scale: float | None) -> nn.Embedding:
    """An embedding without its initialisation, as above."""
    kind = nn.Embedding if scale is None else ScaledEmbedding
    embedding = kind(rows, width, _weight=torch.empty(rows, width, device=META), _freeze=True)
    if isinstance(embedding, ScaledEmbedding):
        embedding.embed_scale = torch.tensor(scale)
    return embedding
