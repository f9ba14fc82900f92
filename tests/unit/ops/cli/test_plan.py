"""`furrow models plan` compares need and memory: needs from headers, hosts that have it, and what would make a model
fit."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner

from control.operations.spec import build_spec
from control.placement.need import DeviceRoom
from ops.cli import plan as plan_command
from ops.cli.models import models
from ops.cli.plan import MemoryPlan, make_plan
from ops.demo import MODEL_DIR
from worker.native.host import unavailable

MIB = 2**20
pytestmark = pytest.mark.skipif(unavailable() is not None, reason="torch computes models here")


def planned(*free_mib: int, tp: int = 1, kv_tokens: int | None = 4096, quant: str | None = None) -> MemoryPlan:
    spec = build_spec("demo", demo=MODEL_DIR, tp=tp, kv_tokens=kv_tokens, quant=quant)
    return make_plan(spec, [DeviceRoom(f"host{index}", free * MIB) for index, free in enumerate(free_mib)])


def test_each_host_is_compared_with_all_ranks_of_a_replica() -> None:
    plan = planned(10, 1000, tp=2)
    needs = sum(rank.total for rank in plan.ranks)
    assert [(one.host, one.needs, one.fits) for one in plan.hosts] == [("host0", needs, False), ("host1", needs, True)]
    assert len(plan.ranks) == 2 and plan.remedies == []
    assert plan.ranks[0].kv == 4096 * plan.ranks[0].bytes_per_token


def test_fewer_kv_tokens_are_named_that_just_fit() -> None:
    [remedy] = planned(200, kv_tokens=10**6).remedies
    option, tokens = remedy.split()
    assert option == "--kv-tokens" and int(tokens) > 256
    assert planned(200, kv_tokens=int(tokens)).hosts[0].fits
    assert not planned(200, kv_tokens=int(tokens) + 1).hosts[0].fits


def test_a_quantization_is_named_where_it_alone_makes_it_fit() -> None:
    plan = planned(1000)
    smaller = planned(1000, quant="int8")
    between = (plan.hosts[0].needs + smaller.hosts[0].needs) // 2
    spec = build_spec("demo", demo=MODEL_DIR, kv_tokens=4096)
    assert "--quant int8" in make_plan(spec, [DeviceRoom("host", between)]).remedies


def test_ranks_on_several_hosts_are_named_where_one_has_too_little() -> None:
    whole, halves = planned(1, kv_tokens=10**6), planned(1, kv_tokens=10**6, tp=2)
    each = max(rank.total for rank in halves.ranks) // MIB + 1
    assert whole.ranks[0].total > each * MIB
    assert "--tp 2 --spread, with a rank on each of 2 hosts" in planned(each, each, kv_tokens=10**6).remedies
    assert "--spread, with its ranks on several hosts" in planned(each, each, kv_tokens=10**6, tp=2).remedies
    assert not any("--spread" in one for one in planned(each, kv_tokens=10**6).remedies)


def test_uneven_shares_are_named_where_even_ranks_do_not_fit() -> None:
    """They are what a farm gives, without an option."""
    each = planned(1, kv_tokens=10**6, tp=2).ranks[0].total // MIB
    remedies = planned(int(1.6 * each), int(0.6 * each), kv_tokens=10**6, tp=2).remedies
    assert "uneven shares on 2 hosts, 3:1 parts of the model, as a farm gives them" in remedies
    assert not any("uneven" in one for one in planned(int(1.6 * each), 1, kv_tokens=10**6, tp=2).remedies)


def test_nothing_helps_where_not_even_the_weights_fit() -> None:
    assert planned(1).remedies == []


def test_the_command_prints_the_figures_and_ends_with_1_where_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [DeviceRoom("small", 300 * MIB), DeviceRoom("large", 2**34)]

    def free(redis_url: str | None) -> list[DeviceRoom]:
        return hosts

    monkeypatch.setattr(plan_command, "free_memory", free)
    fits = CliRunner().invoke(models, ["plan", "demo", "--kv-tokens", "200000"])
    assert fits.exit_code == 0 and "for 200,000 tokens" in fits.output
    assert "too little" in fits.output.splitlines()[2] and fits.output.splitlines()[3].endswith("fits")
    hosts.pop()
    refused = CliRunner().invoke(models, ["plan", "demo", "--kv-tokens", "200000"])
    assert refused.exit_code == 1 and "It fits with --kv-tokens" in refused.output
    answer = json.loads(CliRunner().invoke(models, ["plan", "demo", "--kv-tokens", "200000", "--json"]).output)
    assert answer["hosts"][0]["has"] == 300 * MIB and answer["remedies"]


GIB = 2**30


def test_ranks_on_gpus_need_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host with GPUs these are compared, of the others their memory; the numbers of a GPU are estimates."""
    rooms = [DeviceRoom("cpus", 10 * MIB), DeviceRoom("gpus", 64 * GIB)]
    rooms += [DeviceRoom("gpus", size * GIB, f"cuda:{index}") for index, size in enumerate((1, 8, 16))]
    spec = build_spec("demo", demo=MODEL_DIR, kv_tokens=4096)
    one = make_plan(spec, rooms)
    assert [(fit.host, fit.device, fit.fits) for fit in one.hosts] == [
        ("cpus", "cpu", False),
        ("gpus", "cuda:0", False),
        ("gpus", "cuda:1", True),
        ("gpus", "cuda:2", True),
    ]
    [rank] = one.gpu_ranks
    assert not rank.exact and one.hosts[1].needs == rank.total and one.remedies == []
    two = msgspec.structs.replace(spec, tp=2)
    assert make_plan(two, rooms).remedies == [] and make_plan(two, rooms[:-1]).hosts[2].fits
    monkeypatch.setattr(plan_command, "free_memory", lambda redis_url: rooms[:-1])
    refused = CliRunner().invoke(models, ["plan", "demo", "--tp", "2", "--kv-tokens", "4096"])
    assert refused.exit_code == 1 and "on a GPU" in refused.output and "gpus cuda:1" in refused.output
    named = CliRunner().invoke(models, ["plan", "demo", "--devices", "cuda:1", "--json"])
    assert [one["device"] for one in json.loads(named.output)["hosts"]] == ["cuda:1"]


def test_fewer_kv_tokens_are_named_that_fit_on_a_gpu() -> None:
    spec = build_spec("demo", demo=MODEL_DIR, kv_tokens=10**7)
    plan = make_plan(spec, [DeviceRoom("gpus", 64 * GIB), DeviceRoom("gpus", 8 * GIB, "cuda:0")])
    [remedy] = plan.remedies
    option, tokens = remedy.split()
    fewer = msgspec.structs.replace(spec, kv_tokens=int(tokens))
    assert option == "--kv-tokens" and make_plan(fewer, [DeviceRoom("gpus", 8 * GIB, "cuda:0")]).hosts[0].fits
