"""Replies of a rank: one per command, told apart by `op`, that echoes the command's `epoch` and `seq`."""

from __future__ import annotations

import msgspec

from control.errors import RankErrorKind


class Reply(msgspec.Struct, tag_field="op", frozen=True, kw_only=True):
    """A reply of a rank; `epoch` and `seq` are the command's."""

    epoch: int
    seq: int
    rank: int


class Pong(Reply, tag="pong", frozen=True):
    world_size: int
    cuda_device: str
    host: str = ""
    network: str = ""
    """Equal for processes that share a loopback interface; empty where that is not known."""


class InitOk(Reply, tag="init_ok", frozen=True):
    pass


class NcclSanityResult(Reply, tag="nccl_sanity_result", frozen=True):
    observed_sum: float


class RankBackend(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The circumstances on a rank that the bits of logits depend on."""

    dtype: str
    kv_type: str = ""
    """How keys and values are stored; "" from a rank of an older version."""
    kernels: str
    """The code that computes, with its versions."""
    collective: str = ""
    """The transport of the ranks' sums; "" for a rank alone."""
    batch_invariant: bool = False
    """True if a token's logits have the same bits in any batch and chunk, and with any number of threads."""


class LoadDenseShardOk(Reply, tag="load_dense_shard_ok", frozen=True):
    kv_tokens: int
    """Tokens of KV memory that this rank can hold; the leader admits by the tightest rank."""
    weight_bytes: int
    verifies_guesses: bool = False
    """True if rows may have guesses on this rank."""
    backend: RankBackend | None = None
    """None from a rank of an older version."""
    shares: list[int] = []
    """Those of the command; a rank of an older version loads even ones, and says none."""


class GenerateStepOk(Reply, tag="generate_step_ok", frozen=True):
    checksum: int
    """Checksum of the batch's layout and the tokens broadcast at its end; equal on every rank."""


class KvCacheCleared(Reply, tag="kv_cache_cleared", frozen=True):
    pass


class Unloaded(Reply, tag="unloaded", frozen=True):
    pass


class Bye(Reply, tag="bye", frozen=True):
    pass


class ErrorReply(Reply, tag="error", frozen=True):
    kind: RankErrorKind
    message: str


AnyReply = (
    Pong | InitOk | NcclSanityResult | LoadDenseShardOk | GenerateStepOk | KvCacheCleared | Unloaded | Bye | ErrorReply
)

decode_reply = msgspec.json.Decoder(AnyReply).decode
