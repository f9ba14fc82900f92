"""Intervals and roles: what each rank keeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.errors import UnsupportedArchitecture
from worker.layers.sharding import ShardPlan, padded_share, share


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
    plans = [ShardPlan({}, kv_heads=2, rank=rank, world_size=4) for rank in range(4)]
    kept = [plan.interval("model.layers.0.self_attn.v_proj", 32) for plan in plans]
    assert kept == [(0, 16), (0, 16), (16, 32), (16, 32)]
    assert {plan.local_kv_heads for plan in plans} == {1}
    assert plans[1].interval("model.layers.0.self_attn.q_proj", 64) == (16, 32)


def test_roles_are_found_by_pattern() -> None:
    """Layer and expert numbers are wild; what is whole, or not in the plan, has no role."""
    plan = ShardPlan({"layers.*.mlp.up_proj": "colwise", "layers.*.q_norm": "replicated_with_grad_allreduce"}, 2, 0, 2)
    assert plan.role("model.layers.17.mlp.up_proj") == "colwise"
    assert plan.role("model.layers.1.q_norm") is None
    assert plan.role("model.norm") is None


def test_a_plan_that_is_not_understood() -> None:
    """A role that is unknown here is refused by name, but only where something must be sharded."""
    config = SimpleNamespace(model_type="odd", base_model_tp_plan={"layers.*.mlp": "colwise_gather_output"})
    ShardPlan.of_config(config, 2, 0, 1)
    with pytest.raises(UnsupportedArchitecture, match="'odd' needs colwise_gather_output"):
        ShardPlan.of_config(config, 2, 0, 2)
    config.base_model_tp_plan = None
    with pytest.raises(UnsupportedArchitecture, match="'odd' has no tensor-parallel plan"):
        ShardPlan.of_config(config, 2, 0, 2)
