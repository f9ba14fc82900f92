"""Every error that Furrow raises on purpose, as one tree; the data travels on the exception, never only in its text.

Errors of a request come first, then those of the farm's set-up (settings, Redis, files of models, devices), then those
of a group of ranks.
"""

from __future__ import annotations

from typing import Literal

RankErrorKind = Literal[
    "nccl_init_failed",
    "nccl_not_initialised",
    "unknown_op",
    "bad_request",
    "already_loaded",
    "model_not_loaded",
    "unsupported_arch",
    "cuda_unavailable",
    "load_failed",
    "forward_failed",
]
"""Kinds of error that a rank may answer a command with; the wire's closed list."""


class FurrowError(Exception):
    """Root of the tree. `str(error)` is always fit to be shown to a user: it names the value and the remedy."""


class RequestError(FurrowError):
    """A request that can't be served as it was sent.

    `param` names the offending field where there is one, `code` is OpenAI's machine-readable code or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(RequestError):
    """Prompt and requested tokens don't fit the model's context."""

    def __init__(self, prompt_tokens: int, max_tokens: int, context: int, *, at_least: bool = False) -> None:
        bound = "at least " if at_least else ""
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{bound}{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, "
            f"{max_tokens} in the completion). Please reduce the length of the prompt or of the completion.",
            param="messages",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.context = context


class RequestTooLarge(RequestError):
    """A request that could never fit the KV memory of the model's tightest rank."""


class GrammarRefused(RequestError):
    """A grammar that can't be compiled, or would cost too much; the text says why, in the library's words."""


class TemplateFailed(RequestError):
    """The model's chat template refused the messages."""


class ModelFileBreach(TemplateFailed):
    """A file of the model, run in a process of its own, took more time or memory than it may."""

    def __init__(self, model: str, file: str, deed: str) -> None:
        super().__init__(
            f"The {file} of the model '{model}' {deed} on this request. Its files are at fault: use another model, or "
            f"ask the operator to load the model with a harmless {file}.",
            param="model",
            code="model_file_breach",
        )
        self.model = model
        self.file = file
        self.deed = deed


class ModelFileRefused(RequestError):
    """A file of the model is not used, because it could harm other models."""

    def __init__(self, model: str, file: str, reason: str) -> None:
        super().__init__(
            f"The {file} of the model '{model}' can't be used: {reason}. Use another model, or ask the operator to "
            f"load the model with a harmless {file}.",
            param="model",
            code="model_file_refused",
        )
        self.model = model
        self.file = file
        self.reason = reason


class ModelNotFound(RequestError):
    """No such model in the farm's catalog."""

    def __init__(self, model: str, models: list[str]) -> None:
        names = ", ".join(sorted(models)) or "none: load one with `furrow models load`"
        super().__init__(
            f"The model '{model}' does not exist. Models served here: {names}.", param="model", code="model_not_found"
        )
        self.model = model


class RequestNotFound(RequestError):
    """No such request, or it belongs to another tenant, or its retention has passed."""


class LetterNotFound(RequestError):
    """No dead letter of that request: it was dropped, retried, or pushed out by newer ones."""


class IdempotencyConflict(RequestError):
    """An Idempotency-Key was used again with another body."""


class LogConflict(RequestError):
    """After a failover two API processes had given different continuations of one request; `api` has the other one."""

    def __init__(self, rid: str, api: str) -> None:
        super().__init__(
            f"Redis lost part of the answer to {rid!r}, and another client of it was given a different continuation "
            f"(by {api}), which stands. Send the request again.",
            code="log_conflict",
        )
        self.rid = rid
        self.api = api


class KeyNotFound(RequestError):
    """No such API key, or a name that several have."""


class RateLimited(FurrowError):
    """An API key's limit has no room for this request. `bound` says which: `requests` or `tokens` per minute, or
    `concurrent`; `retry_after` is in seconds. `allowance` is what is left (control.access.Allowance)."""

    def __init__(self, bound: str, limit: int, retry_after: float, allowance: object) -> None:
        unit = "requests at one time" if bound == "concurrent" else f"{bound} per minute"
        moment = "one of them ends" if bound == "concurrent" else f"{max(0.001, retry_after):.3g} s have passed"
        super().__init__(f"This API key's limit of {limit} {unit} is reached. Retry once {moment}.")
        self.bound = bound
        self.limit = limit
        self.retry_after = retry_after
        self.allowance = allowance


class QueueFull(FurrowError):
    """The model's queue is at its bound. `retry_after` is in seconds, from the measured drain rate; `bound` says which
    bound it is: the requests or the tokens that may wait, or the longest wait to be expected."""

    def __init__(self, model: str, queued: int, retry_after: float, bound: str = "requests") -> None:
        reason = "the wait would be too long" if bound == "wait" else f"it holds as many {bound} as it may"
        remedy = ", or send it with priority low, which waits as long as it takes" if bound == "wait" else ""
        super().__init__(
            f"The queue of model '{model}' is full: {reason} ({queued} requests waiting). "
            f"Retry in {retry_after:.0f} s{remedy}."
        )
        self.model = model
        self.queued = queued
        self.retry_after = retry_after
        self.bound = bound


class ImagesFull(FurrowError):
    """The images of requests that have not ended take as many bytes in Redis as they may."""

    def __init__(self, model: str, of: str, used_bytes: int, limit: int) -> None:
        owner = f"model '{model}'" if of == "model" else f"this tenant for model '{model}'"
        super().__init__(
            f"Images of requests that have not ended take {used_bytes} of the {limit} bytes that {owner} may have. "
            "Retry shortly, or send smaller images."
        )


class ArgumentsRefused(FurrowError):
    """A script refused its keys or arguments before it wrote anything: a fault of Furrow's own, never of a client's."""

    def __init__(self, script: str, reason: str) -> None:
        super().__init__(f"The script {script!r} refused a call: {reason}. This is a fault in Furrow; report it.")
        self.script = script


RETRY_AFTER_S = 5.0
"""Retry-After of a model that is not available."""


def state_in_words(state: str) -> str:
    """A model's state as the predicate of a sentence."""
    return "failed to load" if state == "failed" else f"is {state}"


class ModelUnavailable(FurrowError):
    """The model is known but can't serve: failed after back-off, draining, unloading, or no asset yet."""

    retry_after = RETRY_AFTER_S

    def __init__(self, model: str, state: str, detail: str) -> None:
        remedy = f". Repair the cause, then run `furrow models reload {model}`" if state == "failed" else ""
        super().__init__(f"Model '{model}' {state_in_words(state)}: {detail.rstrip('.') if remedy else detail}{remedy}")
        self.model = model
        self.state = state
        self.detail = detail


class SettingsError(FurrowError):
    """A setting that can't be used. The message names it, its value and what is accepted."""


class RedisUnavailable(FurrowError):
    """Redis could not be reached, refused the password, or is not set up for Furrow."""


class RedisFull(RedisUnavailable):
    """Redis has reached its maxmemory: it takes nothing new, and what runs goes on."""

    def __init__(self) -> None:
        super().__init__(
            "The farm's Redis has reached its maxmemory and takes nothing new; requests that run go on. Retry in a few "
            "seconds. An operator can give it more memory."
        )


class RedisDenied(RedisUnavailable):
    """The user of the farm's Redis lacks a right. The message has the server's words and the remedy."""

    def __init__(self, refusal: str) -> None:
        super().__init__(
            f"The farm's Redis denies its user a right: {refusal}. `furrow doctor` prints the ACL SETUSER command that "
            "grants it"
        )


class KeyDamaged(RedisUnavailable):
    """A key of the farm has another type than Furrow writes. Callers wait, as nothing else can be done without it."""

    def __init__(self, key: str, damage: str) -> None:
        super().__init__(
            f"The key {key} of the farm's Redis {damage}: another program has written it. `furrow doctor` prints the "
            "command that mends it"
        )
        self.key = key


class ModelFilesError(FurrowError):
    """A model's files are missing or unreadable; the message names the file and the repository or folder."""


class ModelFilesAway(ModelFilesError):
    """Files are missing or can't be read now; they may be back in a moment, as where a file system is not mounted."""


class HubUnreachable(ModelFilesAway):
    """The hub, or the way to it, failed: another try may succeed."""


class HubNeverReached(HubUnreachable):
    """No file of the repository is on this host, and the hub does not answer: more often a wrong name, or a host
    without internet, than an outage."""


class UnsupportedArchitecture(FurrowError):
    """The model's type is unknown, or it can't be sharded as asked. Raised before any process is spawned."""


class CompilerMissing(SettingsError):
    """The request is computed in C++ only, and this host has neither a library of it nor a compiler that runs."""


class NotMappable(SettingsError):
    """The requested KV memory can't be mapped on this host, now or at the next start."""


class DevicesError(FurrowError):
    """The requested devices are absent, or their count differs from the world size."""


class RankError(FurrowError):
    """A rank answered a command with an error, or was gone."""

    def __init__(self, rank: int, kind: RankErrorKind, message: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}")
        self.rank = rank
        self.message = message
        self.kind: RankErrorKind = kind


class CollectiveFailed(FurrowError):
    """A collective of the group failed: the mark of another rank's end, whoever meets it."""


class CollectiveLeft(CollectiveFailed):
    """This rank left its group while it waited for the others, because its epoch is over."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"left a collective that the others have not come to: {reason}")


def collective_failure(error: BaseException | None) -> CollectiveFailed | None:
    """The failed collective behind `error`, however deep it lies; None where this side failed by itself."""
    while error is not None and not isinstance(error, CollectiveFailed):
        error = error.__cause__
    return error


class GroupError(FurrowError):
    """The combined outcome of leader and ranks: every side that failed is named.

    `leader` is the leader's own exception or None, `ranks` the errors of ranks 1..N-1.
    """

    def __init__(self, action: str, leader: BaseException | None, ranks: list[RankError]) -> None:
        sides = [f"leader {action} failed: {leader}"] if leader is not None else []
        if ranks:
            joined = "; ".join(str(error) for error in ranks)
            sides.append(f"ranks also failed: {joined}" if sides else f"{action} failed on ranks: {joined}")
        super().__init__(" and ".join(sides))
        self.action = action
        self.leader = leader
        self.ranks = ranks


class EpochOver(FurrowError):
    """This life of the group is over; its process must leave the epoch. The base of the three ways it can end."""


class Lost(EpochOver):
    """The lock is gone but nobody else took it: the same process may acquire again and keep its weights."""


class Fenced(EpochOver):
    """The epoch has moved on: another leader holds the lock."""


class Poisoned(EpochOver):
    """Device or collective state of this epoch can't be trusted any more.

    `rank` is who noticed or caused it (-1: the agent), `kind` a short machine-readable reason.
    """

    def __init__(self, kind: str, message: str, rank: int) -> None:
        super().__init__(f"epoch poisoned by rank {rank}: {kind}: {message}")
        self.kind = kind
        self.message = message
        self.rank = rank
