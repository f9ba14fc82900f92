"""Which intervals each rank stores: by role."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.families.family import Roles
from worker.weights.sharding import ShardPlan, padded_share, share

ROLES: Roles = {
    "self_attn.q_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.qkv_proj": "query_key_value",
    "mlp.gate_up_proj": "halves",
}


@given(size=st.integers(1, 400), world_size=st.integers(1, 16))
def test_shares_cover_all_once(size: int, world_size: int) -> None:
    """Shares lie end to end, and differ in width by at most one."""
    parts = [share(size, rank, world_size) for rank in range(world_size)]
    assert [start for start, _ in parts] + [size] == [0] + [stop for _, stop in parts]
    widths = {stop - start for start, stop in parts}
    assert max(widths) - min(widths) <= 1


@given(size=st.integers(1, 400), world_size=st.integers(1, 16))
def test_padded_shares_are_equally_wide(size: int, world_size: int) -> None:
    """Padded shares cover all once too, and every rank gathers the same width."""
    parts = [padded_share(size, rank, world_size) for rank in range(world_size)]
    assert [place for start, stop, _ in parts for place in range(start, stop)] == list(range(size))
    assert len({width for _, _, width in parts}) == 1
    assert parts[0][2] * world_size >= size


def test_key_value_heads_are_repeated() -> None:
    """With 2 heads of 16 on 4 ranks, ranks 0 and 1 keep the first head and ranks 2 and 3 the second."""
    plans = [ShardPlan(ROLES, heads=4, kv_heads=2, rank=rank, world_size=4) for rank in range(4)]
    kept = [plan.intervals("model.layers.0.self_attn.v_proj", 32) for plan in plans]
    assert kept == [[(0, 16)], [(0, 16)], [(16, 32)], [(16, 32)]]
    assert {plan.local_kv_heads for plan in plans} == {1}
    assert plans[1].intervals("model.layers.0.self_attn.q_proj", 64) == [(16, 32)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_packed_matrices_are_cut_by_region(world_size: int) -> None:
    """Ranks keep the same heads or columns of every region, and together all rows, copies of key-value heads apart."""
    plans = [ShardPlan(ROLES, heads=4, kv_heads=2, rank=rank, world_size=world_size) for rank in range(world_size)]
    whole = list(range(8 * (4 + 2 + 2)))
    joined = {place for plan in plans for place in _places(plan, "self_attn.qkv_proj", whole)}
    assert joined == set(whole)
    for plan in plans:
        rows = _places(plan, "self_attn.qkv_proj", whole)
        queries, keys, values = (
            [row - first for row in rows if first <= row < last] for first, last in ((0, 32), (32, 48), (48, 64))
        )
        assert len(queries) == 8 * plan.local_heads and keys == values and len(keys) == 8 * plan.local_kv_heads
        halves = _places(plan, "mlp.gate_up_proj", list(range(90)))
        gate, up = halves[: len(halves) // 2], halves[len(halves) // 2 :]
        assert up == [row + 45 for row in gate]
    assert sorted(row for plan in plans for row in _places(plan, "mlp.gate_up_proj", list(range(90)))) == list(
        range(90)
    )


def _places(plan: ShardPlan, name: str, rows: list[int]) -> list[int]:
    return [row for start, stop in plan.intervals(f"model.layers.1.{name}", len(rows)) for row in rows[start:stop]]


def test_roles_are_found_by_pattern() -> None:
    """Layer numbers are wild; what the table does not name has no role, nor has anything on a rank alone."""
    plan = ShardPlan(ROLES, 4, 2, 0, 2)
    assert plan.role("model.layers.17.self_attn.q_proj") == "colwise"
    assert plan.role("model.layers.1.self_attn.q_norm") is None
    assert plan.role("model.norm") is None
    assert ShardPlan(ROLES, 4, 2, 0, 1).role("model.layers.17.self_attn.q_proj") is None
