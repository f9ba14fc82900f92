"""KV memory as a model and an engine see it: the layout of a rank's cache, a layer's attention, a store's interface.

No sequence is ever rewound: a recurrent state could not follow. Another sequence may begin with the start of its cache;
of a model with recurrent layers, where a copy of the state was kept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from control.placement.need import KVCost

if TYPE_CHECKING:  # numpy holds the KV memory of a CPU; torch's tensors are those of a model that it computes
    from torch import Tensor


DOUBLED_BYTES = 16 * 2**20
"""A pool of slabs that would be larger gets a sibling instead of growing: copying half of this stalls a step for some
5 ms."""


@dataclass(frozen=True, eq=False)
class Variant:
    """`window` counts the positions that a token sees, itself included (None: all before it). `softcap` bounds scores
    by `softcap · tanh(score / softcap)`. `sinks` (heads,) are learned scores that take weight but give no value. `ends`
    (tokens,) of a step are the positions before which each token sees its sequence (None: its own included)."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    ends: Tensor | None = None
    chunked: bool = False
    """True if `window` is the length of chunks, and a token sees no further than the begin of its own."""

    @property
    def plain(self) -> bool:
        """True where torch's fused kernel can do it."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True)
class KVType:
    """The form in which a CPU stores keys and values for the forward in C++ (native/source/cached.h)."""

    name: str
    element: np.dtype[Any]
    kind: str
    """Its name among the kinds of weights."""
    block: int = 0
    """Numbers that share a scale of 2 bytes; 0: there are none."""

    def row(self, head_dim: int) -> int:
        """Elements of a key or value of one head at one position."""
        return head_dim + 2 * -(-head_dim // self.block) if self.block else head_dim


STORED_TYPES = {
    kind.name: kind
    for kind in (
        KVType("f32", np.dtype(np.float32), "float32"),
        KVType("f16", np.dtype(np.float16), "float16"),
        KVType("bf16", np.dtype(np.uint16), "bfloat16"),
        KVType("q8_0", np.dtype(np.uint8), "q8_0", block=32),
    )
}


@dataclass(frozen=True)
class StateLayout:
    """The shape of one sequence's recurrent state on one rank. Each of `layers` layers keeps the last `window` inputs
    of a convolution over `channels`, and for each of `heads` a matrix (key_dim, value_dim), in this order."""

    layers: int
    window: int
    channels: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def convolution(self) -> int:
        """Numbers of a layer's window."""
        return self.window * self.channels

    @property
    def layer_numbers(self) -> int:
        """Numbers of a layer."""
        return self.convolution + self.heads * self.key_dim * self.value_dim

    @property
    def numbers(self) -> int:
        """Numbers of all layers."""
        return self.layers * self.layer_numbers


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer. `kv_heads` counts the rank's own."""

    kv_heads: int
    head_dim: int
    window: int | None = None
    source: int | None = None
    """The earlier layer whose keys and values this one attends to, of the same shape; None if it stores its own."""
    parts: int = 2
    """Keys and values; 1 where the stored rows are both (MLA)."""
    chunked: bool = False
    """True if `window` is the length of chunks, and a token sees no further than the begin of its own."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that store keys and values of one shape, by their numbers. No layer that reads them sees more than the
    last `window` positions (None: all)."""

    kv_heads: int
    head_dim: int
    window: int | None
    parts: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class CacheLayout:
    """The shape of one rank's cache, with one entry for each layer of the model that attends. `state` is None for a
    model without recurrent layers."""

    layers: tuple[LayerCache, ...]
    dtype: np.dtype[Any]
    """In which the model computes."""
    device: str
    """As torch names it: "cpu", "cuda:0"."""
    state: StateLayout | None = None
    stored: KVType | None = None
    """The type of stored keys and values; None: `dtype`."""

    @property
    def element(self) -> np.dtype[Any]:
        """Of the stored keys and values."""
        return self.dtype if self.stored is None else self.stored.element

    def row(self, head_dim: int) -> int:
        """Elements of a key or value of one head at one position."""
        return head_dim if self.stored is None else self.stored.row(head_dim)

    @functools.cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers that store keys and values, by shape and window."""
        by_shape: dict[tuple[int, int, int | None, int], list[int]] = {}
        for number, layer in enumerate(self.layers):
            if layer.source is None:
                windows = [other.window for at, other in enumerate(self.layers) if number in (at, other.source)]
                window = None if None in windows else max(width for width in windows if width is not None)
                shape = layer.kv_heads, layer.head_dim, window, layer.parts
                by_shape.setdefault(shape, []).append(number)
        return tuple(LayerGroup(*shape, tuple(layers)) for shape, layers in by_shape.items())

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """By layer: the group that has its keys and values, and its index in the group."""
        places = {
            index: (at, group.layers.index(index)) for at, group in enumerate(self.groups) for index in group.layers
        }
        return tuple(
            places[number if layer.source is None else layer.source] for number, layer in enumerate(self.layers)
        )

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one position in all layers."""
        return sum(map(self._bytes, self.groups))

    def _bytes(self, group: LayerGroup) -> int:
        return group.parts * len(group.layers) * group.kv_heads * self.row(group.head_dim) * self.element.itemsize

    @property
    def cost(self) -> KVCost:
        """The tokens that sequences take, where memory behind windows is freed."""
        windows = [group for group in self.groups if group.window is not None]
        return KVCost(
            state_tokens=self.state_tokens,
            window=max((group.window or 0 for group in windows), default=0),
            windowed_bytes=sum(map(self._bytes, windows)),
            bytes=self.bytes_per_token,
        )

    @property
    def state_dtype(self) -> np.dtype[Any]:
        """States are summed over a whole sequence: 16 bits would lose most of what is added."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    @property
    def state_tokens(self) -> int:
        """Positions whose keys and values take as much memory as the recurrent state of one sequence."""
        if self.state is None:
            return 0
        return -(-self.state.numbers * self.state_dtype.itemsize // self.bytes_per_token)


@dataclass(frozen=True)
class WholeLayout:
    """Attention of sequences that are computed whole, without a cache. `causal`: a position attends to none after
    it."""

    causal: bool
    dtype: np.dtype[Any]
    device: str


@dataclass(frozen=True)
class Extent:
    """The tokens that one sequence adds in a step: `count` of them from position `offset` on."""

    sid: int
    offset: int
    count: int

    @property
    def end(self) -> int:
        return self.offset + self.count


class Attention(Protocol):
    """torch's attention over one step's view of a store."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        """Store key and value (kv heads, T, dim), attend query (heads, T, dim) → (T, heads, dim)."""
        ...


class CacheStep(Protocol):
    """One step's view of a store: places for the new tokens are already reserved."""

    @property
    def attention(self) -> Attention:
        """The attention of a model that torch computes; it stores the model's keys and values."""
        ...


class KVStore(Protocol):
    """Keys and values by sequence. A sequence exists from its first committed token until it is dropped."""

    capacity_tokens: int
    cost: KVCost
    """The part of `capacity_tokens` that sequences take."""
    supports_prefix_sharing: bool
    """True if `fork` is possible."""

    @property
    def used_tokens(self) -> int:
        """Of `capacity_tokens`, whole blocks and states."""
        ...

    def rounded(self, tokens: int) -> int:
        """The part of `capacity_tokens` that a sequence of `tokens` takes, its state included; 0 for no tokens."""
        ...

    def held(self, sid: int) -> int:
        """The part of `capacity_tokens` that a sequence holds, copies of its state included; 0 for an unknown one."""
        ...

    def snapshot(self, sid: int) -> None:
        """Keep a copy of what a sequence will not have any more once it has gone on, until the sequence or its copies
        are dropped: of its recurrent state, of the positions within its windows. Raises RuntimeError where there is
        nothing of the kind."""
        ...

    def drop_snapshots(self, sid: int) -> None:
        """Forget the copies of a sequence's state; an unknown one is no error."""
        ...

    def can_fork(self, donor: int, count: int) -> bool:
        """True if another sequence can begin with the first `count` cached positions of `donor`: any, or those with a
        state."""
        ...

    def length(self, sid: int) -> int | None:
        """Positions that are cached, or None for a sequence that is unknown."""
        ...

    def begin(self, extents: list[Extent], beside: Iterable[Extent] = ()) -> CacheStep:
        """Reserve room for a step whose tokens lie in the batch in the order of `extents`. Changes no length.
        `beside` are those of a step that is under way and will be committed with this one."""
        ...

    def commit(self, extents: list[Extent]) -> None:
        """The step is done: these tokens count from now on. Of those it had reserved room for, the last ones may be
        missing: guesses that were wrong."""
        ...

    def fork(self, sid: int, donor: int, count: int, *, take_over: bool, snapshots: bool = False) -> None:
        """Let the unknown sequence `sid` begin with a copy of the first `count` cached positions of `donor`.
        `take_over` gives it the donor's own memory instead, and removes the donor. `snapshots` gives it the donor's
        copies of its state up to there."""
        ...

    def drop(self, sid: int) -> None:
        """Forget a sequence; an unknown one is no error."""
        ...

    def clear(self) -> None:
        """Forget every sequence."""
        ...


class Stateless:
    """The part of a store that is about recurrent states and windows, for one that keeps all positions alone."""

    def held(self: KVStore, sid: int) -> int:
        return self.rounded(self.length(sid) or 0)

    def snapshot(self, sid: int) -> None:
        raise RuntimeError(f"sequence {sid} has no recurrent state of which a copy could be kept")

    def drop_snapshots(self, sid: int) -> None:
        pass

    def can_fork(self, donor: int, count: int) -> bool:
        return True
