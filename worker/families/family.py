"""The record of a model type. `registry.py` finds the records of all types.

A layer is: attention or a recurrent layer, then a feed-forward network or a mixture of them, each added to its input
and with a norm before or after it. Rotary embeddings turn a head's first numbers. A layer has the projections that
the roles of its type name. Where torch computes a type, its modelling code is transformers', and the record has
what loading and sharding need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from control.errors import UnsupportedArchitecture
from worker.families.gguf import Gguf
from worker.families.recurrence import Recurrence

DEFAULTS_FILE = Path(__file__).with_name("defaults.json")
DEFAULTS: dict[str, dict[str, Any]] = json.loads(DEFAULTS_FILE.read_text())
"""By model type, the values that transformers' class has where config.json omits a field. `make pages` writes them."""

Role = Literal["colwise", "rowwise", "halves", "query_key_value", "width_norm", "experts", "regions", "mamba"]
"""The part of a module, or of a parameter that is no module's, that a rank of several keeps:

colwise          a share of the outputs; of keys and values whole heads
rowwise          a share of the inputs; the products are summed over the ranks
halves           gate above up in one matrix: the same share of the outputs of each
query_key_value  queries, keys and values in one matrix: whole heads of each
width_norm       an RMS norm over all heads at once: the ranks sum their squares
regions          parts of a recurrent layer, one below the other: the same share of each, whole heads where it has some
mamba            the parts of a Mamba layer, one below the other: whole heads of each, and B and C of their groups
experts          a share of each expert's inner width; the outputs are summed over the ranks
"""

Roles = Mapping[str, Role]
"""Role by the name within a layer. What has none is whole on every rank."""

Fields = Mapping[str, Any]
"""The values of a family's fields in a config.json."""

Norms = tuple[str | None, str | None, str | None, str | None]
"""The names of the norms before and after attention, and before and after the feed-forward network."""

BEFORE_BOTH: Norms = ("input_layernorm", None, None, None)
"""One norm, of the input that attention and feed-forward network share."""
ONLY_BEFORE: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
ONLY_AFTER: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND: Norms = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

HeadNorms = Literal["each_head", "each_own_head", "each_turned_head", "all_heads"]
"""Norms of queries and keys: over a head before it is turned by its position, with weights that all heads share or each
with its own, or after that; or over all heads at once."""

NormKind = Literal["rms", "layer", "layer_with_bias"]

BATCHABLE_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that are served. `dynamic` and `longrope` depend on the batch's longest sequence: one user's length
would change another's answer."""


def is_sparse(fields: Fields, layer: int) -> bool:
    """True if a layer has experts, by the fields that most types have."""
    dense = fields.get("mlp_only_layers") or ()
    first = fields.get("first_k_dense_replace", 0)
    period = fields.get("decoder_sparse_step", 1)
    return layer >= first and layer not in dense and (layer + 1) % period == 0


def listed_sparse(fields: Fields, layer: int) -> bool:
    """The same, of types that may list the kinds of all feed-forward networks."""
    kinds = fields["mlp_layer_types"]
    return is_sparse(fields, layer) if kinds is None else kinds[layer] == "sparse"


def sparse_but_first(fields: Fields, layer: int) -> bool:
    """The same, of types of which all layers but the first have experts where nothing is listed."""
    kinds = fields["mlp_layer_types"]
    return layer > 0 if kinds is None else kinds[layer] == "sparse"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts."""

    tensors: tuple[str, str, str]
    """The tensors of one expert on disk (gate, up, down; `{}` is its number), or as they are read where `together`. The
    first is "" where experts have no gate."""
    count: str = "num_experts"
    """The field of config.json with the number of experts."""
    chosen: str = "num_experts_per_tok"
    """The field with the number of experts of a token."""
    switch: str | None = None
    """The field that says if a model of the type has experts at all; None where all have."""
    may_lack: bool = False
    """True if a model may have 0 experts, and is dense then."""
    together: bool = False
    """True if files have the experts of a layer in one tensor, gate and up by turns, with biases."""
    stored_above: tuple[str, str] | None = None
    """The names of the tensors where files may have the experts of a layer in one, the outputs of gate before those of
    up, and inputs last."""
    inputs_first: bool = False
    """True if these tensors, and those of transformers' module, have inputs before outputs."""
    any_order: bool = False
    """True if inputs may come before outputs in these tensors: the hidden size shows where they are."""
    router: str = "gate"
    """The name of the router beside the experts."""
    router_scales: bool = False
    """True if the router has, beside its projection `proj`, a norm without weights and a scale of its inputs, and a
    scale of each expert's weight."""
    beside: tuple[str, str, str] | None = None
    """For layers with experts beside a feed-forward network, whose outputs are added: the names of the norms after
    the network, before the experts, and after them. The experts and their router are the layer's own modules, and
    their input are the hidden states."""
    layers: Callable[[Fields, int], bool] = is_sparse
    """True if a layer has experts."""
    shared: str = "n_shared_experts"
    """The field with the number of experts, in one, that every token goes through."""
    sigmoid_scores: bool = False
    """True if the score of an expert is the sigmoid of the router's output, and not its share of all."""
    weighted_inputs: bool = False
    """True if an expert's input is multiplied by its weight, and not its output. Weights are scores then."""
    correction: Literal["router", "mixture", "statics"] | None = None
    """The module of `e_score_correction_bias`, which is added to scores for the choice alone: the router, the mixture,
    or `moe_statics` of the router, as a row; None: there is none."""
    correction_switch: str | None = None
    """The field that says if a model of the type has `correction`; None where all have."""
    least_sum: float = 1e-20
    """The number added to the sum by which the weights of a token's experts are divided."""
    jitter: str | None = None
    """The field with the jitter noise of a sparse mixer (https://arxiv.org/abs/2409.12136): an expert's weight is its
    share among those whose outputs of the router are near its own, within twice this part."""


@dataclass(frozen=True)
class TextPart:
    """The text part of a multimodal model type. Where config.json says nothing, `tied` and the fields `omitted` have
    the values of transformers' class."""

    whole: str
    """The model type of the checkpoint with all parts."""
    model_type: str | None
    """That of the text part as a model alone; None where `text_config` says it."""
    tied: bool
    omitted: tuple[str, ...] = ()
    always: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the text part that its class does not have, as its model computes one thing alone."""
    images: Images | None = None
    """The reader of images; None where they are not served."""

    @property
    def defaults(self) -> Fields:
        return {name: DEFAULTS[str(self.model_type)][name] for name in self.omitted}


@dataclass(frozen=True)
class Images:
    """The properties by which image parts of one reader differ."""

    tower: Literal["siglip", "qwen"]
    token: int
    """The placeholder's id where config.json has none."""
    sections: tuple[int, ...] = ()
    """Frequencies that turn by time, height and width (mRoPE) where config.json has none."""
    deepstack: tuple[int, ...] = ()
    """Layers of the tower whose outputs are added to those of the text part, where config.json has none."""


def intermediate_size(config: dict[str, Any]) -> int | None:
    return config.get("intermediate_size")


@dataclass(frozen=True)
class Family:
    """A model type: its name in config.json, and the part of each weight that a rank keeps."""

    model_type: str
    roles: Roles

    fields: tuple[str, ...] = ()
    """The fields of config.json that the forward in C++ reads beside those that all types have; a field that is not
    among them has no effect. Without any, torch computes the type."""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names of fields in config.json, by the field, as in an `attribute_map` of transformers' class. Where a file
    has both, the other name wins."""
    one_for_all: frozenset[str] = frozenset()
    """Fields that files may have as a list with a number for each layer; served are lists of one number."""
    own_defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of fields that transformers' class has in its code, where config.json omits them."""

    completed: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    """config.json of the type with fields that follow from others, or that older files have under other names."""

    norms: Norms = ONLY_BEFORE
    after_norm_switch: str | None = None
    """The field that says if a model of the type has the norms after attention and feed-forward network; None where all
    have."""
    norm_kind: NormKind = "rms"
    parallel: bool = False
    """True if the feed-forward network has the input of attention, and the outputs of both are added to the hidden
    states."""
    norm_offset: bool = False
    """True if one is added to the weights of norms."""
    head_norms: HeadNorms | None = None
    head_norm_switch: str | None = None
    """The field that says if a model of the type has `head_norms`; None where all have."""
    head_norms_by_hidden_size: bool = False
    """True if the widths of `head_norms` follow from `hidden_size` in transformers' module, so that heads have no other
    width."""
    activations: Mapping[str, str] = field(
        default_factory=lambda: {"silu": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
    )
    """The functions that the feed-forward networks may have, by their names in config.json."""
    biased: bool = False
    """True if all linear layers have a bias, that of the vocabulary too."""
    head_bias: str | None = None
    """The field that says if the layer of the vocabulary has a bias; None where it has one only in a type that is
    `biased`."""
    query_key_value_bias: bool = False
    """True if these projections always have a bias. A field may give them one where this is False."""
    output_bias: bool = True
    """False if the output of attention has no bias, even where the other projections have one."""
    output_gate: bool = False
    """True if the query projection has a gate of the attention's output behind the query of each head."""
    head_gates: str | None = None
    """The field that says if the output of each head is multiplied by the sigmoid of a gate of its own, an output of
    `g_proj`; None for a type without."""
    scaled_embedding: bool = False
    """True if embeddings are multiplied by the root of the hidden size."""
    layer_scales: bool = False
    """True if the hidden states are multiplied by a stored number, `layer_scalar`, behind each layer."""
    feed_forward_width: Callable[[dict[str, Any]], int | None] = intermediate_size
    """The width of the feed-forward networks that are no experts, of a config.json that was checked; None for
    transformers' default."""
    torch_numbers: tuple[str, ...] = ()
    """Fields with a number above 0, or null. Where they have a number, torch computes the model."""

    layer_kinds: Callable[[dict[str, Any]], list[str]] | None = None
    """Each layer's kind of attention, of a config.json that was checked; None: `layer_types`, or what follows from
    `slides`."""
    slides: Callable[[Fields, int], bool] = lambda fields, layer: True
    """True if a layer has a sliding window where config.json has a width of windows, but no `layer_types`."""
    rotates: Callable[[Fields, int, str], bool] = lambda fields, layer, kind: True
    """True if a layer of a kind rotates its queries and keys."""
    has_sinks: Callable[[str], bool] = lambda kind: True
    """True if a layer of a kind has the parameter `sinks`, in a type that has a role for it."""
    layer_ids_end: bool = False
    """True if the table of the layers' own inputs may have fewer rows than there are token ids."""
    queries_grow: bool = False
    """True if the rotary parameter `llama_4_scaling_beta` makes queries grow with the logarithm of their position."""
    unturned_queries_grow: str | None = None
    """The field that says if `attn_scale` makes queries grow with the logarithm of their position, over `floor_scale`,
    in layers that don't rotate them."""
    unweighted_head_norms: str | None = None
    """The field that says if queries and keys are normed by head behind the rotation, without weights, in layers that
    rotate them."""
    rope_neighbours: bool = False
    """True if rotary pairs are neighbours, and not half a head apart."""
    scores_scaled: bool = True
    """False if the products of queries and keys are scores as they are, and not divided by the root of a head's
    width."""
    value_norm: bool = False
    """True if values are normed by head, without weights."""
    latent: Literal["turned", "whole"] | None = None
    """Of a type whose keys and values are products of a row that all heads share (MLA), what `head_dim` of its files
    means: the part of a head that is turned by positions, or all of it. None for other types."""
    keys_are_values: Callable[[Fields, str], bool] = lambda fields, kind: False
    """True if a layer of a kind has no projection of values: they are its keys, as these are before their norm."""
    rotates_apart: bool = False
    """True if transformers' module rotates queries and keys in calls of their own."""
    rope_by_kind: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """By kind of layer, where each has an embedding of its own, the field with its theta."""
    theta_beside_rope: bool = False
    """True if `rope_theta` counts where config.json has no other rotary parameters, though the class's own are no
    plain embedding: they have no theta."""
    rope_types: frozenset[str] = BATCHABLE_ROPE
    fixed_alpha: bool = False
    """True if a rotary embedding of type `dynamic` with a number `alpha` stretches its base by that once for all
    lengths."""
    longrope_names: frozenset[str] = frozenset()
    """Other names of `longrope` in the files of the type."""

    experts: Experts | None = None
    recurrent: Callable[[dict[str, Any]], Recurrence | None] | None = None
    """The reader of the recurrent layers from config.json (families/recurrence.py); None for a type without."""
    heads_by_layer: Callable[[dict[str, Any]], list[dict[str, int]]] | None = None
    """For each layer the fields `head_dim` and `num_key_value_heads` where they differ from the model's; None for a
    type whose layers are alike."""
    lists_heads: bool = False
    """config.json may have those fields by layer, as `per_layer_config`."""

    bidirectional_images: str | None = None
    """The `use_bidirectional_attention` by which only the tokens of an image attend to later ones."""

    stored_names: tuple[tuple[str, str], ...] = ()
    """Parts of transformers' parameter names, and what files have in their place."""
    native_names: tuple[tuple[str, str], ...] = ()
    """Parts of the names of modules whose forward is C++, and what transformers has in their place."""
    gguf: tuple[Gguf, ...] = ()
    """The architectures of GGUF files with models of the type."""
    pooling: Literal["causal", "bidirectional"] | None = None
    """The attention of a model for vectors or scores; None where such models are not served. A causal one pools by its
    last token; a bidirectional one is one where config.json says so."""

    @cached_property
    def defaults(self) -> Fields:
        """The values of transformers' class where config.json omits a field. Raises KeyError before `make pages` has
        written those of a new type."""
        return {**DEFAULTS[self.model_type], **self.own_defaults}

    @property
    def default_names(self) -> tuple[str, ...]:
        """The fields whose defaults are those of transformers' class."""
        fields = (name for name in self.fields if name not in self.own_defaults)
        return ("num_key_value_heads", *(("rope_parameters", *fields) if self.is_native else ()))

    @property
    def is_native(self) -> bool:
        """True if the forward is C++ where the host can compile it."""
        return bool(self.fields)

    @property
    def kv_heads(self) -> int | None:
        """Key-value heads where config.json says nothing; None: as many as query heads."""
        return self.defaults["num_key_value_heads"]

    @property
    def is_gated(self) -> bool:
        """True if the feed-forward network has two projections, of which one is the gate of the other."""
        roles = self.natively_named().roles
        return "mlp.up_proj" not in roles or "mlp.gate_proj" in roles

    @property
    def turns_parts(self) -> bool:
        """True if the modules can rotate a part of each head: where transformers' class has one, as a share or a
        width, or heads have parts of their own for it."""
        rope: dict[str, Any] = self.defaults["rope_parameters"] or {}
        kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
        shares = any(
            "partial_rotary_factor" in parameters for parameters in kinds if parameters.get("rope_type") == "default"
        )
        return shares or "rotary_dim" in self.fields or self.latent is not None

    @property
    def head_norm_names(self) -> tuple[str, str]:
        turned = self.head_norms == "each_turned_head"
        return ("query_layernorm", "key_layernorm") if turned else ("q_norm", "k_norm")

    def has_experts(self, config: Fields) -> bool:
        """True if a model of this config.json has experts."""
        experts = self.experts
        return experts is not None and (experts.switch is None or bool(config.get(experts.switch)))

    def natively_named(self) -> Family:
        """The record with the names that modules have whose forward is C++. A module of transformers may have two of
        them: one in models with experts, and one in others."""
        roles = dict(self.roles)
        for ours, theirs in self.native_names:
            renamed = {f".{name}".replace(theirs, ours)[1:]: role for name, role in roles.items()}
            roles |= renamed
        return replace(self, roles=roles, stored_names=(*self.native_names, *self.stored_names))


def one_for_all(name: str, value: Any, family: Family) -> Any:
    """The one number of a field that the type may have as a list; any other value as it is."""
    if name not in family.one_for_all or not isinstance(value, list):
        return value
    numbers = cast(list[Any], value)
    if not numbers or any(number != numbers[0] for number in numbers):
        raise UnsupportedArchitecture(
            f"config.json has {name} = {str(numbers)[:60]}: layers with different numbers are not served."
        )
    return numbers[0]
