"""Heartbeats and poison decide a replica's state."""

from __future__ import annotations

import pytest
from msgspec import structs

from control.constants import RANK_BEAT_MS
from control.errors import Fenced
from control.keys import ModelKeys
from control.messages import ModelAssets, ModelSpec, PoolingAssets
from control.records import catalog
from control.records.backend import Backend, put_backend
from control.replicas import health, model_overviews
from control.replicas.lease import Lease
from tests.contract.conftest import MODEL, Farm


def word(lease: Lease, seq: int = 4, phase: str = "ready", pending_ms: int = 0) -> health.Beat:
    return health.Beat(
        epoch=lease.epoch,
        seq=seq,
        oldest_pending_ms=pending_ms,
        device="cpu",
        memory_bytes=1,
        phase=phase,
        pid=9,
        host="h",
    )


def beat(farm: Farm, lease: Lease, rank: int, said: health.Beat) -> None:
    farm.run(health.beat(MODEL, "r0", rank, said))


def test_a_beat_is_heard_for_a_while(farm: Farm) -> None:
    """Every rank's last word is there until it lapses; silence is None."""
    lease = farm.lead()
    beat(farm, lease, 1, word(lease, seq=7))
    assert health.heartbeats(farm.client, MODEL, "r0", 2) == [None, word(lease, seq=7)]
    assert 0 < farm.client.pttl(lease.keys.heartbeat(1)) <= RANK_BEAT_MS


def test_an_older_epoch_is_not_heard(farm: Farm) -> None:
    """A rank that stayed behind is told so, and does not hide the new one's word."""
    old = farm.lead()
    farm.lose(old)
    new = farm.lead(owner="two")
    beat(farm, new, 0, word(new))
    with pytest.raises(Fenced):
        beat(farm, old, 0, word(old))
    assert health.heartbeats(farm.client, MODEL, "r0", 1) == [word(new)]


def test_the_first_poison_counts(farm: Farm) -> None:
    """The first poison is kept. A repeat of the same call returns the same result; another one does not replace it."""
    lease = farm.lead()
    assert health.read_poison(farm.client, MODEL, "r0") is None
    first = (MODEL, "r0", lease.epoch, 1, "desync", "checksums differ")
    assert health.write_poison(farm.client, *first) is True
    assert health.write_poison(farm.client, *first) is True
    assert health.write_poison(farm.client, MODEL, "r0", lease.epoch, 0, "deadline", "late") is False
    poison = health.read_poison(farm.client, MODEL, "r0")
    assert poison == health.Poison(lease.epoch, 1, "desync", "checksums differ")
    assert farm.run(health.poison_history(MODEL, "r0")) == [poison]
    assert farm.client.xlen(lease.keys.poisons) == 1


def test_how_an_epoch_came_to_be_is_remembered(farm: Farm) -> None:
    """Newest first, each once, however often its leader wrote it down."""
    first, second = (health.Formation(epoch, epoch + 1, epoch + 2, epoch + 30, epoch + 400) for epoch in (1000, 2000))
    for formation in (first, second, second):
        farm.run(health.note_formation(MODEL, "r0", formation))
    assert farm.run(health.formations(MODEL, "r0")) == [second, first]
    assert farm.run(health.formations(MODEL, "r1")) == []


def test_an_epoch_that_is_over_can_not_be_poisoned(farm: Farm) -> None:
    """A late poison does not hit the next epoch."""
    old = farm.lead()
    farm.lose(old)
    farm.lead(owner="two")
    assert health.write_poison(farm.client, MODEL, "r0", old.epoch, 1, "late", "news") is False
    assert health.read_poison(farm.client, MODEL, "r0") is None


def test_poison_rings_the_bell(farm: Farm) -> None:
    """A leader that waits for work hears of it."""
    lease = farm.lead()
    bell = farm.claim(lease).bell
    health.write_poison(farm.client, MODEL, "r0", lease.epoch, 1, "k", "m")
    assert farm.client.xread({farm.keys.bell: bell})[0][1][0][1]["why"] == "poison"


def test_an_overview_tells_what_runs_and_why_not(farm: Farm) -> None:
    """From unknown over loading and loaded to poisoned, each with its reason."""
    assert model_overviews.overview(farm.client, MODEL).detail == "the farm does not know the model yet"
    catalog.put_spec(farm.client, ModelSpec(name=MODEL, source="/x", tp=2))
    assert model_overviews.overview(farm.client, MODEL).detail == "no worker has it yet"
    health.write_status(farm.client, MODEL, "r0", "unplaceable", "no host has room", host="h1")
    unplaced = model_overviews.overview(farm.client, MODEL).replicas[0]
    assert (unplaced.host, unplaced.placed) == ("", False), "h1 planned, and does not have it"
    health.write_status(farm.client, MODEL, "r0", "running", "", host="h1")
    assert model_overviews.overview(farm.client, MODEL).replicas[0].host == "h1"
    lease = farm.lead(world_size=2)
    beat(farm, lease, 0, word(lease, phase="loading"))
    overview = model_overviews.overview(farm.client, MODEL)
    assert (overview.state, overview.detail) == ("loading", "rank 0 is loading")
    beat(farm, lease, 0, structs.replace(word(lease, phase="loading"), read_bytes=430, weight_bytes=1000))
    assert model_overviews.overview(farm.client, MODEL).detail == "rank 0 is loading: 43 %"
    assert overview.kind is None
    for rank in (0, 1):
        beat(farm, lease, rank, word(lease))
    assets = ModelAssets(
        tokenizer_json="{}",
        tokenizer_config={},
        chat_template=None,
        generation_config={},
        context_length=8,
        vocab_size=8,
        eos_ids=[1],
        kv_tokens=8,
        created=1,
    )
    farm.run(catalog.put_assets(MODEL, assets))
    farm.put("a")
    overview = model_overviews.overviews(farm.client)[0]
    assert (overview.state, overview.queued, overview.kind) == ("loaded", 1, "generate")
    ranker = structs.replace(assets, pooling=PoolingAssets(kind="score", dimensions=1))
    farm.run(catalog.put_assets(MODEL, ranker))
    assert model_overviews.overview(farm.client, MODEL).kind == "score"
    farm.client.hset(ModelKeys(MODEL).assets, "pooling", '{"kind": "of a later version"}')
    later = model_overviews.overview(farm.client, MODEL)
    assert later.kind is None and later.assets is not None and len(later.assets) == 4
    replica = overview.replicas[0]
    assert (replica.host, replica.devices, replica.epoch, replica.seq) == ("h", ["cpu", "cpu"], lease.epoch, 4)
    health.write_poison(farm.client, MODEL, "r0", lease.epoch, 1, "desync", "differs")
    assert model_overviews.overview(farm.client, MODEL).state == "poisoned"


def test_only_a_replica_that_has_served_recovers(farm: Farm) -> None:
    """The first load of a replica is one, though another replica has published the model's assets before."""
    catalog.put_spec(farm.client, ModelSpec(name=MODEL, source="/x"))
    lease = farm.lead()
    beat(farm, lease, 0, structs.replace(word(lease, phase="loading"), read_bytes=430, weight_bytes=1000))
    farm.client.hset(ModelKeys(MODEL).assets, "created", "1")
    [replica] = model_overviews.overview(farm.client, MODEL).replicas
    assert (replica.state, replica.detail, replica.done_bytes) == ("loading", "rank 0 is loading: 43 %", 430)
    backend = Backend(
        weights="w",
        dtype="float32",
        quant=None,
        dequantize=False,
        tp=1,
        collective="",
        kernels=[],
        batch_invariant=True,
    )
    farm.run(put_backend(MODEL, "r0", backend))
    assert model_overviews.overview(farm.client, MODEL).state == "recovering"


def test_a_status_is_cleared(farm: Farm) -> None:
    """A replica that no agent runs has no status."""
    health.write_status(farm.client, MODEL, "r0", "failed", "out of memory", host="h")
    catalog.put_spec(farm.client, ModelSpec(name=MODEL, source="/x"))
    overview = model_overviews.overview(farm.client, MODEL)
    assert (overview.state, overview.detail) == ("failed", "out of memory")
    health.clear_status(farm.client, MODEL, "r0")
    assert model_overviews.overview(farm.client, MODEL).state == "loading"
