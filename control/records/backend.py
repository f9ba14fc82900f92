"""The record of what the bits of a replica's answers depend on, and its fingerprint, which answers carry."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from control.commands import RankBackend
from control.keys import ModelKeys
from control.redis.connection import Call, read, write


class Backend(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Equal backends give an answer the same bits where `batch_invariant`, and about the same ones elsewhere."""

    weights: str
    """Of the model's files: its configuration and samples of every tensor."""
    dtype: str
    kv_type: str = ""
    """The type of stored keys and values."""
    quant: str | None
    dequantize: bool
    tp: int
    collective: str
    kernels: list[str]
    """Those of each rank; a single one where all have the same."""
    batch_invariant: bool
    engine_version: str = ""
    """Of an external engine, in its own words; empty for Furrow's own, and where the engine does not tell it."""

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of the replica's answers: another one where any field differs."""
        return f"fp_{hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]}"


def backend_of(
    weights: str, quant: str | None, dequantize: bool, ranks: Sequence[RankBackend | None]
) -> Backend | None:
    """The backend of a replica with these ranks, in their order; None where one of them tells nothing."""
    described = [rank for rank in ranks if rank is not None]
    if len(described) < len(ranks):
        return None
    kernels = [rank.kernels for rank in described]
    return Backend(
        weights=weights,
        dtype=described[0].dtype,
        kv_type=described[0].kv_type,
        quant=quant,
        dequantize=dequantize,
        tp=len(described),
        collective=described[0].collective,
        kernels=kernels[:1] if len(set(kernels)) == 1 else kernels,
        batch_invariant=all(rank.batch_invariant for rank in described),
    )


def put_backend(model: str, replica: str, backend: Backend | None) -> Call[int]:
    """Publish the backend of a replica, before it claims anything."""
    key = ModelKeys(model).backends
    if backend is None:
        return read("HDEL", key, replica, parse=int)
    return write("HSET", key, replica, msgspec.json.encode(backend).decode(), parse=int)


def backends(model: str) -> Call[dict[str, Backend]]:
    """The backends of a model's replicas, by the replica's name."""

    def parse(reply: dict[str, str]) -> dict[str, Backend]:
        return {replica: msgspec.json.decode(text, type=Backend) for replica, text in reply.items()}

    return read("HGETALL", ModelKeys(model).backends, parse=parse)
