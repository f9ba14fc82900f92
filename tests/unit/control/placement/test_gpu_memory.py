"""No GPU is planned beyond its memory; and several models share one where they fit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from control.messages import Assignment, ModelSpec
from control.placement.need import ModelNeed, RankNeed
from control.placement.placement import GPU_SHARE, Action, Assign, Host, Unplaceable
from control.placement.rollout import plan

GIB = 2**30
TOKEN = 2**16
CONTEXT = 1024


def rank(gib: float) -> RankNeed:
    return RankNeed(weights=int(gib * GIB), kv=0, step=0, process=0, bytes_per_token=TOKEN, exact=False)


def need(gib: float, tp: int = 1) -> ModelNeed:
    """On a GPU half of what it needs on a CPU."""
    return ModelNeed(revision=1, context=CONTEXT, ranks=[rank(2 * gib)] * tp, gpu_ranks=[rank(gib)] * tp)


def host(*gib: float, name: str = "a") -> Host:
    devices = {f"cuda:{index}": int(size * GIB) for index, size in enumerate(gib)}
    return Host(name, tuple(devices), memory=256 * GIB, device_memory=devices)


def spec(name: str, **fields: Any) -> ModelSpec:
    return ModelSpec(name=name, source=f"/models/{name}", **fields)


def planned(
    hosts: list[Host], needs: dict[str, ModelNeed], *specs: ModelSpec, held: list[Assignment] | None = None
) -> list[Action]:
    there = {one.id: list[Assignment]() for one in hosts} | {hosts[0].id: held or []}
    return plan(list(specs), hosts, there, needs=needs)


def placed(actions: list[Action]) -> dict[str, Assignment]:
    return {one.assignment.spec.name: one.assignment for one in actions if isinstance(one, Assign)}


def test_a_model_alone_gets_most_of_what_its_gpu_has_left() -> None:
    one = placed(planned([host(24)], {"m": need(4)}, spec("m")))["m"]
    assert one.devices == ["cuda:0"] and one.memory == [0]
    assert one.kv_tokens == int(GPU_SHARE * 20 * GIB) // TOKEN
    assert one.device_memory == [4 * GIB + one.kv_tokens * TOKEN]


def test_models_share_a_gpu_where_both_fit() -> None:
    """The first leaves room for the second where its KV tokens are named; a GPU that nobody has goes first."""
    needs = {"m": need(4), "n": need(6)}
    specs = [spec("m", kv_tokens=CONTEXT), spec("n", kv_tokens=CONTEXT)]
    both = placed(planned([host(24)], needs, *specs))
    assert [one.devices for one in both.values()] == [["cuda:0"], ["cuda:0"]]
    assert sum(size for one in both.values() for size in one.device_memory) == 10 * GIB + 2 * CONTEXT * TOKEN
    apart = placed(planned([host(24, 24)], needs, *specs))
    assert sorted(one.devices[0] for one in apart.values()) == ["cuda:0", "cuda:1"]


def test_models_that_are_desired_together_leave_each_other_room() -> None:
    both = placed(planned([host(40)], {"m": need(4), "n": need(6)}, spec("m"), spec("n")))
    assert [one.devices for one in both.values()] == [["cuda:0"], ["cuda:0"]]
    assert sum(size for one in both.values() for size in one.device_memory) <= 40 * GIB


def test_what_fits_on_no_gpu_is_unplaced_with_the_figures() -> None:
    """The CPU never takes its place."""
    [refused] = planned([host(4, 3)], {"m": need(5)}, spec("m"))
    assert isinstance(refused, Unplaceable)
    assert "it needs 5.06 GiB of a GPU's memory; a has 4 GiB on cuda:0, 3 GiB on cuda:1 left" in refused.why


def test_each_rank_has_a_gpu_of_its_own() -> None:
    """Those with too little memory are left out."""
    one = placed(planned([host(24, 2, 16)], {"m": need(8, tp=2)}, spec("m", tp=2)))["m"]
    assert one.devices == ["cuda:0", "cuda:2"] and one.kv_tokens == int(GPU_SHARE * 8 * GIB) // TOKEN
    [refused] = planned([host(24, 2)], {"m": need(8, tp=2)}, spec("m", tp=2))
    assert isinstance(refused, Unplaceable) and "its 2 ranks need 8.06 GiB of a GPU's memory each" in refused.why


def test_a_gpu_that_is_named_must_have_the_memory() -> None:
    named = spec("m", devices=["cuda:1"])
    assert placed(planned([host(2, 24)], {"m": need(8)}, named))["m"].devices == ["cuda:1"]
    [refused] = planned([host(24, 2)], {"m": need(8)}, named)
    assert isinstance(refused, Unplaceable) and "a has 2 GiB on cuda:1 left" in refused.why


@pytest.mark.parametrize("has_need", [True, False])
def test_what_is_not_known_has_a_gpu_alone(has_need: bool) -> None:
    """A rank whose bytes nobody knows may have all of it; a model whose need is not known gets a free one."""
    old = Assignment(spec=spec("old"), replica="r0", ranks=[0], devices=["cuda:0"])
    needs = {"m": need(1)} if has_need else {}
    [refused] = planned([host(24)], needs, spec("old"), spec("m"), held=[old])
    assert isinstance(refused, Unplaceable)
    assert placed(planned([host(24, 24)], needs, spec("old"), spec("m"), held=[old]))["m"].devices == ["cuda:1"]


def test_a_gpu_whose_memory_is_not_told_has_one_rank() -> None:
    """As on a host of an older version."""
    silent = Host("a", ("cuda:0",), memory=64 * GIB)
    named = spec("m", kv_tokens=CONTEXT)
    one = placed(planned([silent], {"m": need(100)}, named))["m"]
    assert one.device_memory == [] and one.kv_tokens is None
    [refused] = planned([silent], {"m": need(100), "n": need(1)}, named, spec("n"), held=[one])
    assert isinstance(refused, Unplaceable) and "asked for 1 devices of one kind" in refused.why


def test_the_memory_of_a_gpu_is_free_again_when_a_replica_leaves() -> None:
    """A change is made in place where a GPU has no room for both."""
    needs = {"m": msgspec.structs.replace(need(16), revision=2)}
    old = Assignment(
        spec=spec("m", kv_tokens=CONTEXT),
        replica="r0",
        ranks=[0],
        devices=["cuda:0"],
        memory=[0],
        device_memory=[16 * GIB],
    )
    desired = spec("m", kv_tokens=CONTEXT, revision=2)
    [leaves] = planned([host(24)], needs, desired, held=[old])
    assert type(leaves).__name__ == "Withdraw"
    assert placed(planned([host(24)], needs, desired))["m"].devices == ["cuda:0"]
