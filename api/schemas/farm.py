"""Bodies of the operator's routes."""

from __future__ import annotations

import msgspec

from control.access import ApiKey, Usage
from control.engines import OWN
from control.messages import LOOKUP_TOKENS, GenerationRequest
from control.operations.checks.findings import Finding
from control.operations.checks.report import HostReport, RedisCard
from control.operations.model_reports import EpochEvent
from control.operations.plots import PlotSample
from control.placement.farm import HostCard
from control.records.api_reports import EndedRequest
from control.replicas.model_overviews import Overview
from control.requests import DeadLetter, OpenRequest


class ModelToLoad(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The options of `furrow models load`; `source` is its MODEL."""

    source: str
    name: str | None = None
    tp: int = 1
    devices: str | None = None
    dtype: str = "auto"
    max_context: int | None = None
    kv_tokens: int | None = None
    kv_type: str = "auto"
    quant: str | None = None
    gguf: str | None = None
    dequantize: bool = False
    prefix_cache: bool = True
    images: bool = True
    lookup: int = LOOKUP_TOKENS
    deterministic: bool = False
    replicas: int | str | None = None
    """A number, or `0..4`: as many as the requests need."""
    target_wait_s: float = 2.0
    idle_s: int = 600
    spread: bool = False
    drain_s: int = 300
    surge: bool = True
    engine: str = OWN
    """An external engine: what `control/engines.py` names."""
    engine_args: dict[str, str] = {}
    sampling: dict[str, float] = {}
    """Defaults of sampling parameters."""
    adapters: dict[str, str] = {}
    """Low-rank adapters of an external engine: absolute paths on the hosts, by name."""


class ModelNamed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str


class ModelToScale(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    replicas: int | str


class ReplicaNamed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    replica: str


class HostNamed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    host: str


class HostToDrain(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`undo`: the host takes replicas again."""

    host: str
    undo: bool = False


class RequestNamed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: str


class LetterNamed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    id: str


class KeyNamed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A key's id, or a name that only one key has."""

    key: str


class KeyLimits(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The limits of a key; null: unchanged; 0 or an empty list: no limit. `expires` in Unix seconds."""

    rpm: int | None = None
    tpm: int | None = None
    max_concurrent: int | None = None
    priority_cap: str | None = None
    models: list[str] | None = None
    expires: int | None = None

    def set_fields(self) -> dict[str, object]:
        names = (field.name for field in msgspec.structs.fields(KeyLimits))
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class KeyToCreate(KeyLimits, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    tenant: str = ""
    admin: bool = False


class KeyToChange(KeyLimits, kw_only=True, forbid_unknown_fields=True):
    key: str


class KeyCard(msgspec.Struct, kw_only=True):
    """A key. Times are Unix seconds, 0 for never; `secret` is given once, when the key is made."""

    id: str
    name: str
    tenant: str
    state: str
    admin: bool
    created: int
    expires: int
    revoked: int
    last_used: int | None
    rpm: int
    tpm: int
    max_concurrent: int
    priority_cap: str
    models: list[str]
    secret: str | None = None


def key_card(key: ApiKey, now: float, last_used: int | None = None, secret: str | None = None) -> KeyCard:
    fields = {name: value for name, value in msgspec.structs.asdict(key).items() if name != "sha256"}
    return KeyCard(**fields, state=key.state(now), last_used=last_used, secret=secret)


class Letter(msgspec.Struct, kw_only=True):
    """A request that crashed its group when it ran alone."""

    id: str
    model: str
    tenant: str
    priority: str
    cause: str
    replica: str
    attempts: int
    prompt_tokens: int
    entries: int
    """Entries of its token log."""
    at_ms: int


class LetterText(msgspec.Struct, kw_only=True):
    """A dead letter with what reproduces its crash."""

    letter: Letter
    params: GenerationRequest
    prompt: str | None
    """Null where the model's tokenizer is not known any more."""


class AnswerText(msgspec.Struct, kw_only=True):
    """One choice of an answer, special tokens written out; `finish_reason` is null while it is written."""

    index: int
    text: str
    finish_reason: str | None
    cause: str | None


class RequestText(msgspec.Struct, kw_only=True):
    """The prompt and answers of a request. `prompt` is null once it is not kept any more: after the end, without
    --keep-requests."""

    id: str
    model: str
    prompt: str | None
    answers: list[AnswerText]


def letter_card(model: str, letter: DeadLetter) -> Letter:
    """A dead letter without what its client sent."""
    return Letter(
        id=letter.rid,
        model=model,
        tenant=letter.tenant,
        priority=letter.priority,
        cause=letter.cause,
        replica=letter.replica,
        attempts=letter.attempts,
        prompt_tokens=letter.prompt_tokens,
        entries=letter.seq,
        at_ms=letter.at_ms,
    )


class FarmCard(msgspec.Struct, kw_only=True):
    """The whole farm."""

    models: list[Overview]
    hosts: list[HostCard]
    apis: list[str]
    """Ids of the API processes that have a heartbeat."""
    dead_letters: dict[str, int]
    """Counts by model, without zeros."""
    keys: int
    redis: list[RedisCard] = []
    """Its primaries; empty where INFO is not allowed."""
    findings: list[Finding] = []
    """Warnings and errors about hosts, their files and Redis, each with its remedy, as `furrow doctor` tells them."""


class FarmAway(msgspec.Struct, kw_only=True):
    """The farm's state is not known: Redis does not answer."""

    error: str


class Done(msgspec.Struct, kw_only=True):
    """The change, in words."""

    done: str
    id: str | None = None
    """The request that was begun or ended."""
    revision: int | None = None
    """The model's revision, where it changed."""


class Requests(msgspec.Struct, kw_only=True):
    data: list[OpenRequest]
    object: str = "list"


class EndedRequests(msgspec.Struct, kw_only=True):
    data: list[EndedRequest]
    object: str = "list"


class Plots(msgspec.Struct, kw_only=True):
    data: list[PlotSample]
    object: str = "list"


class Letters(msgspec.Struct, kw_only=True):
    data: list[Letter]
    object: str = "list"


class History(msgspec.Struct, kw_only=True):
    data: list[EpochEvent]
    object: str = "list"


class Keys(msgspec.Struct, kw_only=True):
    data: list[KeyCard]
    object: str = "list"


class Models(msgspec.Struct, kw_only=True):
    data: list[Overview]
    object: str = "list"


class Hosts(msgspec.Struct, kw_only=True):
    data: list[HostReport]
    object: str = "list"


class UsageList(msgspec.Struct, kw_only=True):
    data: list[Usage]
    object: str = "list"
