"""Commands of a leader to its ranks, told apart by `op`, and the replies of the ranks.

Each command is answered by exactly one reply that echoes its `epoch` and `seq`. The protocol evolves by adding ops,
never by a version field.
"""

from __future__ import annotations

import msgspec

from control.errors import RankErrorKind


class Command(msgspec.Struct, tag_field="op", frozen=True, kw_only=True):
    """A message from a leader to a rank. `seq` counts from 1 without a gap within an epoch."""

    epoch: int
    seq: int


class Ping(Command, tag="ping", frozen=True):
    """Answered by Pong."""


class Init(Command, tag="init", frozen=True):
    """Join the group: the ranks meet over keys of this epoch. Sent to all before the leader joins."""

    world_size: int


class NcclSanityCheck(Command, tag="nccl_sanity_check", frozen=True):
    """All-reduce a 1: every rank must see the world size. The name is the wire's, on gloo too."""


class LoadDenseShard(Command, tag="load_dense_shard", frozen=True):
    """Build this rank's shard of the model; a rank that kept its weights from an older epoch answers at once.

    A second load in one epoch is `already_loaded`.
    """

    model_id: str
    config_json: str
    safetensors_paths: list[str]
    dtype: str = "float32"
    quant: str | None = None
    dequantize: bool = False
    """Weights that a GGUF file has in blocks become plain numbers."""
    kv_type: str = "auto"
    kv_tokens: int | None = None
    """Tokens of KV memory to reserve; None lets the rank choose from its free memory."""
    kv_at_most: bool = False
    """`kv_tokens` were chosen by an estimate: on a GPU that has less free memory than that, fewer are reserved."""
    shares: list[int] = []
    """By rank, how many units of all heads and widths it has; empty for even shares."""


class Prefix(msgspec.Struct, frozen=True, array_like=True):
    """Sequence `sid` begins with the first `count` positions of `donor`'s KV: a copy, unless the donor leaves. With
    `snapshots` it takes over the donor's copies of its recurrent state up to there too."""

    sid: int
    donor: int
    count: int
    snapshots: bool = False


class StepRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sequence `sid`, whose KV holds `offset` positions so far, feeds `tokens`.

    `sample` says whether the row's last position is sampled (the last chunk of a prefill). `scored` are the positions
    [start, stop) of the row, beside that one, whose logits are computed, in windows of equal size on every rank.
    `guesses` of its last tokens have not been sampled: the position before each is sampled too, and only guesses that
    equal what was sampled before them are cached. `second` is the position at which the second text of a pair begins, 0
    for a single text. `snapshot` keeps a copy of the recurrent state behind the row, where others may begin.
    """

    sid: int
    tokens: list[int]
    offset: int
    sample: bool
    scored: tuple[int, int] | None = None
    guesses: int = 0
    second: int = 0
    snapshot: bool = False


class BatchChange(msgspec.Struct, omit_defaults=True):
    """The changes of a step to the running batch.

    A sequence that is new to the rank has a row with offset 0. A sequence whose last row was sampled and that has no
    row here decodes by itself: it feeds the token that was broadcast at the end of the previous step. `left` are
    forgotten before the step. `paused` are sequences that sit this step out, KV kept. `kept` have ended; their KV stays
    until they are in `left`, because others may begin with it: `prefixes` says which ones do, before any leaves. The
    row of such a sequence has the prefix's count as its offset. A donor in `left` hands its KV over, cut to the last
    prefix that is taken of it. The copies of the states of `dropped_snapshots` are forgotten once the prefixes have
    begun, and before the step. `requests` are the ids of the requests of the sequences that begin, by sid: for the
    ranks' log lines alone.
    """

    rows: list[StepRow] = []
    left: list[int] = []
    paused: list[int] = []
    kept: list[int] = []
    prefixes: list[Prefix] = []
    dropped_snapshots: list[int] = []
    requests: dict[int, str] = {}


class GenerateStep(Command, tag="generate_step", frozen=True, kw_only=True):
    """One forward of the whole batch; the command holds what changes.

    With `repeat`, rank 0's broadcast ends with 1 or 0: after a 1 every sequence that was sampled decodes once more,
    without another command.
    """

    model_id: str
    change: BatchChange
    repeat: bool = False


class StepImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image in the prompt of sequence `sid`; the other fields are PromptImage's."""

    sid: int
    start: int
    count: int
    height: int
    width: int
    digest: str


class GenerateStepWithImages(GenerateStep, tag="generate_step_with_images", frozen=True, kw_only=True):
    """A step in which sequences with images begin: `images` are all images of theirs, in the order of their places.

    A rank remembers them until the sequence leaves. It encodes an image when a row first holds one of its placeholders;
    rank 0 then broadcasts the pixels, which no command carries. No row has more than `chunk_size` tokens.
    """

    images: list[StepImage]
    chunk_size: int


class ClearKvCache(Command, tag="clear_kv_cache", frozen=True):
    """Forget every sequence of the model."""

    model_id: str


class UnloadModel(Command, tag="unload_model", frozen=True):
    """Free the shard; later steps for that model are an error.

    No leader sends it yet, because a rank belongs to one model: an unload of a model ends the processes of its ranks.
    That frees all that they hold, where torch's pools, CUDA's context and pinned memory would stay in a process.
    """

    model_id: str


class ShutdownRank(Command, tag="shutdown", frozen=True):
    """Answer bye and exit 0."""


AnyCommand = (
    Ping
    | Init
    | NcclSanityCheck
    | LoadDenseShard
    | GenerateStep
    | GenerateStepWithImages
    | ClearKvCache
    | UnloadModel
    | ShutdownRank
)

decode_command = msgspec.json.Decoder(AnyCommand).decode


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
    """The type in which keys and values are stored; "" from a rank of an older version."""
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
