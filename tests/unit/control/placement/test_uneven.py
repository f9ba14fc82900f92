"""Uneven shares are planned on unequal hosts."""

from __future__ import annotations

from typing import Any

from control.messages import Assignment, ModelSpec
from control.placement.give_back import KvUse
from control.placement.need import ModelNeed, RankNeed
from control.placement.placement import Action, Assign, Host, Unplaceable
from control.placement.rollout import plan

GIB = 2**30
TOKEN = 2**16
CONTEXT = 1024
UNITS = 4


def rank(gib: float, token: int = TOKEN) -> RankNeed:
    return RankNeed(weights=int(gib * GIB), kv=0, step=0, process=0, bytes_per_token=token)


def need(tp: int = 2, uneven: bool = True) -> ModelNeed:
    """A unit takes 2 GiB and a fourth of the bytes of a token; each rank 1 GiB beside them."""
    units = [rank(1 + 2 * own, own * TOKEN) for own in range(1, UNITS - tp + 2)]
    even = rank(1 + 2 * UNITS / tp, UNITS // tp * TOKEN)
    return ModelNeed(
        revision=1, context=CONTEXT, ranks=[even] * tp, unit_ranks=units if uneven else [], units=UNITS if uneven else 0
    )


def spec(tp: int = 2, **fields: Any) -> ModelSpec:
    return ModelSpec(name="m", source="/m", tp=tp, **fields)


def planned(sizes: list[float], model_need: ModelNeed, held: dict[str, Assignment] | None = None) -> list[Action]:
    hosts = [Host(f"h{index}", memory=int(size * GIB), dedicated=True) for index, size in enumerate(sizes)]
    there = {host.id: [one] if (one := (held or {}).get(host.id)) else [] for host in hosts}
    return plan([spec(len(model_need.ranks))], hosts, there, needs={"m": model_need})


def placed(actions: list[Action]) -> dict[str, Assignment]:
    assert all(isinstance(one, Assign) for one in actions), actions
    return {one.host: one.assignment for one in actions if isinstance(one, Assign)}


def test_even_shares_go_first() -> None:
    parts = placed(planned([6, 6], need()))
    assert all(part.shares == [] for part in parts.values()) and len(parts) == 2


def test_a_host_with_less_memory_gets_fewer_units() -> None:
    """All parts say the same shares; the bytes of each are within its host's, and KV memory is that of the tighter."""
    parts = placed(planned([8.5, 4], need()))
    assert [part.shares for part in parts.values()] == [[3, 1], [3, 1]]
    assert {host: part.ranks for host, part in parts.items()} == {"h0": [0], "h1": [1]}
    tokens = parts["h0"].kv_tokens
    assert tokens == parts["h1"].kv_tokens == int(1.5 * GIB) // (3 * TOKEN)
    assert parts["h0"].memory == [7 * GIB + 3 * TOKEN * tokens] and parts["h1"].memory == [3 * GIB + TOKEN * tokens]


def test_the_units_go_where_most_is_left() -> None:
    parts = placed(planned([4, 9.5, 3.2], need()))
    assert {host: part.shares[part.ranks[0]] for host, part in parts.items()} == {"h0": 1, "h1": 3}
    three = placed(planned([5.2, 3.2, 3.2], need(tp=3)))
    assert sorted(part.shares[part.ranks[0]] for part in three.values()) == [1, 1, 2]


def test_what_fits_in_no_shares_is_unplaced() -> None:
    [refused] = planned([7, 2.9], need())
    assert isinstance(refused, Unplaceable) and "its 2 ranks need" in refused.why
    [unknown] = planned([8, 4], need(uneven=False))
    assert isinstance(unknown, Unplaceable)


def test_a_rank_of_a_lost_host_keeps_its_units() -> None:
    """On another host that has the memory for them."""
    parts = placed(planned([8.5, 4], need()))
    [lost] = placed(planned([8.5, 0.5, 5], need(), {"h0": parts["h0"]})).values()
    assert (lost.ranks, lost.shares, lost.memory, lost.kv_tokens) == (
        [1],
        [3, 1],
        parts["h1"].memory,
        parts["h0"].kv_tokens,
    )
    [refused] = planned([8.5, 2.9], need(), {"h0": parts["h0"]})
    assert isinstance(refused, Unplaceable)


def test_kv_memory_is_given_back_by_units() -> None:
    """A smaller share is that of the units of each rank."""
    uneven = {
        f"h{number}": Assignment(
            spec=spec(),
            replica="r0",
            ranks=[number],
            devices=["cpu"],
            memory=[size * GIB],
            shares=[1, 3],
            kv_tokens=8192,
            kv_target=2048,
        )
        for number, size in enumerate((4, 9))
    }
    hosts = [Host("h0", memory=9 * GIB), Host("h1", memory=12 * GIB)]
    held = {host: [part] for host, part in uneven.items()}
    uses = {("m", "r0"): KvUse(used=0, limit=2048)}
    actions = plan([spec()], hosts, held, needs={"m": need()}, uses=uses)
    assert [one.assignment.memory for one in actions if isinstance(one, Assign)] == [
        [3 * GIB + 2048 * TOKEN],
        [7 * GIB + 2048 * 3 * TOKEN],
    ]
