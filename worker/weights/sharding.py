"""The part of each parameter that a rank keeps, from the roles in the records of families; no torch.

A column-parallel layer keeps rows of its weight (outputs), a row-parallel one keeps columns (inputs) and sums over the
ranks. Parameters without a role are kept whole.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from worker.families.family import Role, Roles


def share(size: int, rank: int, world_size: int, width: int = 1) -> tuple[int, int]:
    """The rank's interval of `size` things; intervals differ by at most one where it does not divide. `width`: the
    interval of so many neighbours together, from this one on."""
    return size * rank // world_size, size * (rank + width) // world_size


def padded_share(size: int, rank: int, world_size: int) -> tuple[int, int, int]:
    """(start, stop, width): intervals of equal `width`, the last ones short or empty. For what is gathered."""
    width = -(-size // world_size)
    return min(size, rank * width), min(size, (rank + 1) * width), width


def bordered_share(size: int, borders: tuple[int, ...], rank: int, world_size: int, width: int = 1) -> tuple[int, int]:
    """As `share`, cut at multiples of the first of `borders` that leaves each rank something, and of 1 where none
    does."""
    for border in borders:
        if size % border == 0 and size // border >= world_size:
            start, stop = share(size // border, rank, world_size, width)
            return start * border, stop * border
    return share(size, rank, world_size, width)


def ends_at(size: int, border: int, borders: tuple[int, ...], world_size: int) -> bool:
    """True if the bordered shares of all ranks end at multiples of `border`."""
    return all(bordered_share(size, borders, rank, world_size)[0] % border == 0 for rank in range(1, world_size))


IN_LAYER = re.compile(r"(?:model\.)?layers\.\d+\.(.+)")
LAYER = re.compile(r"\blayers\.(\d+)\.")

FEED_FORWARDS = (".mlp.", ".feed_forward.", ".shared_mlp.", ".mixer.up_proj", ".mixer.down_proj", ".shared_experts.")
"""Parts of the names of modules with inner widths, which are cut at borders."""
OUTPUTS: set[Role | None] = {"colwise", "halves", "query_key_value", "width_norm", "regions", "mamba"}
"""Roles that keep rows of a weight, and parts of a vector."""


@dataclass(frozen=True)
class ShardPlan:
    """The plan of one rank. `heads` and `kv_heads` are those of the whole model; `layer_kv_heads` has the latter by
    layer where they differ."""

    roles: Roles
    heads: int
    kv_heads: int
    rank: int
    world_size: int
    borders: tuple[int, ...] = ()
    """Feed-forward widths are cut at multiples of the first of these that leaves each rank something."""
    layer_kv_heads: Sequence[int] = ()
    regions: tuple[int, ...] = ()
    """Widths of the parts of a weight with the role `regions` or `mamba`, as `Recurrence.regions`."""
    groups: int = 0
    """Groups of heads in Mamba layers."""
    shares: tuple[int, ...] = ()
    """By rank, how many units it has of all heads and widths, which are cut as for so many ranks as there are units.
    Empty: one each."""

    @property
    def units(self) -> int:
        """Parts into which heads and widths are cut."""
        return sum(self.shares) or self.world_size

    @property
    def first_unit(self) -> int:
        return sum(self.shares[: self.rank]) if self.shares else self.rank

    @property
    def own_units(self) -> int:
        return self.shares[self.rank] if self.shares else 1

    def role(self, name: str) -> Role | None:
        """The role of a module or parameter by its full name, e.g. `model.layers.3.mlp.up_proj`. A rank alone keeps
        everything."""
        match = IN_LAYER.fullmatch(name) if self.world_size > 1 else None
        return None if match is None else self.roles.get(match[1])

    def intervals(self, module: str, size: int) -> list[tuple[int, int]]:
        """The intervals that this rank keeps of `size` outputs (or inputs) of a sharded module, in order."""
        match self.role(module):
            case "halves":
                half = size // 2
                start, stop = self.feed_forward_share(half)
                return [(start, stop), (half + start, half + stop)]
            case "query_key_value":
                width = size // (self.heads + 2 * self.kv_heads)
                start, stop = self._share(self.heads)
                first, last = self._kv_share(self.kv_heads)
                keys = self.heads
                values = self.heads + self.kv_heads
                places = [(start, stop), (keys + first, keys + last), (values + first, values + last)]
                return [(width * begin, width * end) for begin, end in places]
            case "regions":
                starts = itertools.accumulate(self.regions, initial=0)
                shares = [self._share(width) for width in self.regions]
                return [(at + start, at + stop) for at, (start, stop) in zip(starts, shares, strict=False)]
            case "mamba":
                return self._of_mamba(module)
            case _ if module.endswith((".k_proj", ".v_proj", ".k_norm")):
                heads = self._kv_heads_of(module)
                width = size // heads
                first, last = self._kv_share(heads)
                return [(width * first, width * last)]
            case _ if ".linear_attn." in module:
                tiles = max(1, len(self.regions) - 2)
                start, stop = self._share(size // tiles)
                return [(at + start, at + stop) for at in range(0, size, size // tiles)]
            case _ if any(part in module for part in FEED_FORWARDS):
                return [self.feed_forward_share(size)]
            case _:
                return [self._share(size)]

    def feed_forward_share(self, size: int) -> tuple[int, int]:
        """This rank's interval of `size` inner values of a feed-forward network, or of one expert."""
        return bordered_share(size, self.borders, self.first_unit, self.units, self.own_units)

    def _of_mamba(self, module: str) -> list[tuple[int, int]]:
        """Gates, inputs, B, C and steps for the first projection; inputs, B and C for the convolution."""
        inner, _, of_groups, _, heads = self.regions
        first, last = self._kv_share(self.groups)
        group = (of_groups // self.groups * first, of_groups // self.groups * last)
        shares = [self._share(inner), self._share(inner), group, group, self._share(heads)]
        starts = itertools.accumulate(self.regions, initial=0)
        places = [(at + start, at + stop) for at, (start, stop) in zip(starts, shares, strict=False)]
        if module.endswith(".in_proj"):
            return places
        return [(start - inner, stop - inner) for start, stop in places[1:4]]

    def _share(self, size: int) -> tuple[int, int]:
        return share(size, self.first_unit, self.units, self.own_units)

    def _kv_heads_of(self, module: str) -> int:
        match = LAYER.search(module) if self.layer_kv_heads else None
        return self.kv_heads if match is None else self.layer_kv_heads[int(match[1])]

    def _kv_share(self, heads: int) -> tuple[int, int]:
        """This rank's key-value heads, or groups. With fewer of them than ranks, neighbours share one, each with a
        copy."""
        if heads < self.world_size:
            head = self.rank * heads // self.world_size
            return head, head + 1
        return self._share(heads)

    @property
    def local_heads(self) -> int:
        return self.heads * self.own_units // self.units

    @property
    def local_kv_heads(self) -> int:
        return self.kv_heads_here(self.kv_heads)

    def kv_heads_here(self, heads: int) -> int:
        """Of so many key-value heads of a layer, those of this rank."""
        return max(1, heads * self.own_units // self.units)
