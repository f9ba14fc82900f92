"""A replica without a model: real lease, claims and emits, and tokens that cost nothing to make."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from tokenizers import Tokenizer

from control import requests
from control.errors import ModelUnavailable
from control.messages import GenerationRequest, LogEntry, ModelAssets, ModelSpec
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import Call, Posted, run, run_every
from control.replicas import health
from control.replicas.lease import Lease, acquire, release, renew
from control.requests import Claimed, Emission
from ops.bench.fanout.ring import TOKENS, Ring
from ops.bench.fanout.schedule import TEXT
from ops.demo import MODEL_DIR

MODEL = "scripted"
_TEND_S = 0.5
_CONTEXT = 1 << 20
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


def publish(client: SyncRedis) -> tuple[Tokenizer, list[int]]:
    """Put the model into the catalog, with the demonstration model's tokenizer; that, and what every stream says."""
    folder = MODEL_DIR
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(text)
    config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    end = tokenizer.token_to_id(config["eos_token"])
    assert end is not None, "the tokenizer has its own end-of-sequence token"
    assets = ModelAssets(
        tokenizer_json=text,
        tokenizer_config=config,
        chat_template=(folder / "chat_template.jinja").read_text(encoding="utf-8"),
        generation_config={},
        context_length=_CONTEXT,
        vocab_size=tokenizer.get_vocab_size(),
        eos_ids=[end],
        kv_tokens=1 << 30,
        created=int(time.time()),
    )
    catalog.put_spec(client, ModelSpec(name=MODEL, source="scripted"))
    run(client, catalog.put_assets(MODEL, assets))
    return tokenizer, tokenizer.encode(TEXT, add_special_tokens=False).ids


def read_claimed(client: SyncRedis, claims: list[Claimed]) -> list[tuple[Claimed, GenerationRequest]]:
    """The claimed requests with their parameters, without those that are gone."""
    found = run_every(client, [requests.read_params(MODEL, claimed.rid) for claimed in claims])
    return [(claimed, params) for claimed, params in zip(claims, found, strict=True) if params is not None]


def number_of(params: GenerationRequest, tokenizer: Tokenizer) -> int:
    """The number that the client put at the end of its message."""
    found = _LAST_NUMBER.search(tokenizer.decode(params.prompt))
    if found is None:
        raise ValueError("a prompt without a number was claimed")
    return int(found[0])


@dataclass(slots=True)
class _Row:
    client: int
    tokens: int
    seq: int = 1


class Replica:
    """Speaks to as many streams as it has slots, one token each per step."""

    def __init__(self, client: SyncRedis, name: str, slots: int, tokenizer: Tokenizer, tokens: Sequence[int]) -> None:
        self._client, self._slots, self._tokens, self._tokenizer = client, slots, tokens, tokenizer
        lease = run(client, acquire(MODEL, name, "scripted", 1))
        if lease is None:
            raise ModelUnavailable(MODEL, "failed", f"somebody else leads replica {name}")
        self.lease: Lease = lease
        self._rows: dict[str, _Row] = {}
        self._tended = 0.0

    def step(self, ring: Ring) -> int:
        """One step: emit, and claim for the free slots, in one round trip as a real leader does. Returns the tokens."""
        emissions = [self._speak(rid, row) for rid, row in self._rows.items()]
        room = self._slots - len(self._rows)
        calls = [requests.emit(self.lease, emissions), requests.claim(self.lease, room, 1 << 40)]
        now = time.monotonic()
        for row in self._rows.values():
            ring.times[row.client * TOKENS + row.seq % TOKENS] = now
        emitted, claims = Posted(self._client, [*calls, *self._tending(now)]).values()[:2]
        for row in self._rows.values():
            row.seq += 1
        gone = [*emitted.cancelled, *emitted.expired]
        if gone:
            run(self._client, requests.emit(self.lease, [self._drop(rid) for rid in gone if rid in self._rows]))
        ended = [rid for rid, row in self._rows.items() if row.seq > row.tokens]
        for rid in [*ended, *emitted.taken, *gone]:
            self._rows.pop(rid, None)
        for claimed, params in read_claimed(self._client, claims.requests):
            client = number_of(params, self._tokenizer)
            self._rows[claimed.rid] = _Row(client, params.sampling.max_tokens)
        return len(emissions)

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    def leave(self) -> None:
        run(self._client, release(self.lease))

    def _speak(self, rid: str, row: _Row) -> Emission:
        last = row.seq == row.tokens
        end = ("length", "max_tokens") if last else (None, None)
        entry = LogEntry(row.seq, 0, self._tokens[row.seq % len(self._tokens)], *end)
        return Emission(rid, row.seq, [entry], "finished" if last else None)

    def _drop(self, rid: str) -> Emission:
        seq = self._rows[rid].seq
        return Emission(rid, seq, [LogEntry(seq, 0, None, "cancelled", "the client left")], "cancelled")

    def _tending(self, now: float) -> list[Call[None]]:
        """Now and then the lock is renewed and the heart beats."""
        if now - self._tended < _TEND_S:
            return []
        self._tended = now
        beat = health.Beat(
            epoch=self.lease.epoch,
            seq=0,
            oldest_pending_ms=0,
            device="none",
            memory_bytes=0,
            phase="ready",
            pid=1,
            host="",
        )
        return [renew(self.lease, 1), health.beat(MODEL, self.lease.replica, 0, beat)]

    def tend(self) -> None:
        """Renew and beat, if it is time."""
        run_every(self._client, self._tending(time.monotonic()))
