"""The specification of each model, and the assets that an API process needs of it: plain fields, readable by hand."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from control import constants, keys
from control.errors import ModelNotFound
from control.keys import ModelKeys
from control.messages import ModelAssets, ModelSpec
from control.redis.clients import SyncRedis
from control.redis.connection import Call, optional_text, read, run, run_all, run_every, write

T = TypeVar("T", bound=msgspec.Struct)


def put_spec(client: SyncRedis, spec: ModelSpec, *, again: bool = False) -> int:
    """Make `spec` the desired state and return its revision, which grows only when something changed, or `again`."""
    # The specification first: a name in the set whose specification is not there yet would be nothing.
    revision = run(client, _put_spec(spec, "again" if again else "change"))
    enter_name(client, spec.name)
    return revision


def restore_spec(client: SyncRedis, spec: ModelSpec) -> None:
    """Bring a specification back that Redis has lost; one that is there stays."""
    run(client, _put_spec(spec, "restore"))
    enter_name(client, spec.name)


def is_there(model: str) -> tuple[Call[bool], Call[bool]]:
    """True if Redis has the specification of a model, and its name where all are read."""
    return (
        read("EXISTS", ModelKeys(model).spec, parse=bool),
        read("SISMEMBER", keys.MODELS, model, parse=bool),
    )


def enter_name(client: SyncRedis, name: str) -> None:
    """Enter the model's name where all are read, and say that a specification has changed; harmless for one that is
    there."""
    index = [write("SADD", key, name, parse=int) for key in (keys.MODELS, keys.METERED)]
    run_every(client, [*index, read("INCR", keys.MODELS_VERSION, parse=int)])


def _put_spec(spec: ModelSpec, mode: str) -> Call[int]:
    fields = {name: value for name, value in as_fields(spec).items() if name != "revision"}
    return Call("put_spec", (ModelKeys(spec.name).spec,), (mode, spec.revision, *_flat(fields)), int)


def ring(model: str, why: str) -> Call[str]:
    """Wake the model's leaders that wait for requests."""
    return write(
        "XADD", ModelKeys(model).bell, "MAXLEN", "~", constants.BELL_LENGTH, "*", "why", why, "rid", "", parse=str
    )


def get_spec(client: SyncRedis, model: str) -> ModelSpec | None:
    """The specification, a tombstone included; None for a model that the farm does not know."""
    return run(client, spec_of(model))


def spec_of(model: str) -> Call[ModelSpec | None]:
    """As `get_spec`, as a call."""
    return _read_struct(ModelKeys(model).spec, ModelSpec)


def version() -> Call[str | None]:
    """A token that every change of a specification changes. Processes of older versions don't change it."""
    return read("GET", keys.MODELS_VERSION, parse=optional_text)


def names() -> Call[list[str]]:
    """The names of all models, in order; the specification of one may not be there yet, or any more."""
    return read("SMEMBERS", keys.MODELS, parse=sorted)


def list_specs(client: SyncRedis) -> list[ModelSpec]:
    """Every model's specification, tombstones included, in order of name."""
    specs = run_every(client, [spec_of(name) for name in run(client, names())])
    return [spec for spec in specs if spec is not None]


def model_names(client: SyncRedis, model: str | None = None) -> list[str]:
    """Every model's name, or just `model`. Raises ModelNotFound for one that the farm does not know."""
    names_of_all = [spec.name for spec in list_specs(client)]
    if model is not None and model not in names_of_all:
        raise ModelNotFound(model, names_of_all)
    return names_of_all if model is None else [model]


def same(first: ModelSpec, second: ModelSpec) -> bool:
    """True if both specifications are equal apart from their revisions."""
    return msgspec.structs.replace(first, revision=0) == msgspec.structs.replace(second, revision=0)


def tombstone(client: SyncRedis, model: str) -> bool:
    """Ask for the model to be unloaded; False if there is none."""
    is_known = run(client, Call("tombstone", (ModelKeys(model).spec,), (), bool))
    run(client, read("INCR", keys.MODELS_VERSION, parse=int))
    return is_known


def forget(client: SyncRedis, spec: ModelSpec) -> None:
    """The last step of an unload: the model is not known any more. Its epochs are, because they only grow."""
    model_keys = ModelKeys(spec.name)
    names = {*run(client, replicas(spec.name)), *(f"r{index}" for index in range(spec.replicas))}
    statuses = [model_keys.replica(replica).status for replica in sorted(names)]
    _leave_assets(client, model_keys)
    fields = (model_keys.spec, model_keys.demand, model_keys.replicas, model_keys.weights, model_keys.backends)
    run(client, read("DEL", *fields, *statuses, parse=int))
    # The name goes last: by it the planner finds an unload that was cut off, and repeats it.
    run(client, read("SREM", keys.MODELS, spec.name, parse=int))
    if get_spec(client, spec.name) is not None:
        enter_name(client, spec.name)  # it was loaded between the two


def _leave_assets(client: SyncRedis, model_keys: ModelKeys) -> None:
    left = model_keys.assets_left
    keep = [
        read("RENAME", model_keys.assets, left, parse=str),
        read("PEXPIRE", left, constants.ASSETS_LEFT_MS, parse=int),
    ]
    for outcome in run_all(client, keep):
        # Where no leader has published assets, and where this is a repeat, there is nothing to rename.
        if isinstance(outcome, Exception) and "no such key" not in str(outcome):
            raise outcome


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """Of a replica that some host was given: which revision of the specification it runs, on how many ranks."""

    revision: int
    tp: int


def replicas(model: str) -> Call[dict[str, Assigned]]:
    """The replicas that were assigned and have not been retired, by name."""

    def parse(reply: dict[str, str]) -> dict[str, Assigned]:
        return {name: msgspec.json.decode(text, type=Assigned) for name, text in reply.items()}

    return read("HGETALL", ModelKeys(model).replicas, parse=parse)


def put_replica(model: str, replica: str, assigned: Assigned) -> Call[int]:
    """Note that the replica was assigned."""
    return write("HSET", ModelKeys(model).replicas, replica, msgspec.json.encode(assigned).decode(), parse=int)


def put_weights(model: str, replica: str, fingerprint: str) -> Call[int]:
    """Note from which weights the replica's tokens come, before it claims anything."""
    return write("HSET", ModelKeys(model).weights, replica, fingerprint, parse=int)


def retire(client: SyncRedis, model: str, replica: str) -> int | None:
    """Forget a replica that no host has any more, and return its requests to the queue; their number.

    None while it holds its lock: then it is not gone. Running it again is harmless.
    """
    heir = _heir(client, model, replica)
    returned = 0
    while True:
        count, more = run(client, retire_batch(model, replica, heir))
        if count < 0:
            return None
        returned += count
        if not more:
            return returned


def retire_batch(model: str, replica: str, heir: str = "") -> Call[tuple[int, int]]:
    """One batch of `retire`: how many requests wait again, -1 while it holds its lock, and 1 while there are more.

    `heir`: another replica that was seen with a leader. It inherits the suspects of the retired one.
    """
    model_keys = ModelKeys(model)
    replica_keys = model_keys.replica(replica)
    named = (replica_keys.lock, replica_keys.epoch, model_keys.replicas, model_keys.weights, model_keys.backends)
    return Call("retire", named, (model_keys.base, replica_keys.base, replica, heir), _pair)


def _heir(client: SyncRedis, model: str, retired: str) -> str:
    """Another replica of the model that has a leader, "" for none."""
    candidates = [name for name in run(client, replicas(model)) if name != retired]
    led = run_every(client, [read("EXISTS", ModelKeys(model).replica(name).lock, parse=bool) for name in candidates])
    return next((name for name, leads in zip(candidates, led, strict=True) if leads), "")


def _pair(reply: list[int]) -> tuple[int, int]:
    count, more = reply
    return count, more


def put_assets(model: str, assets: ModelAssets) -> Call[bool]:
    """Publish what API processes need; False if the same was there already (its `created` then stays)."""
    return Call("put_assets", (ModelKeys(model).assets,), tuple(_flat(as_fields(assets))), bool)


def get_assets(client: SyncRedis, model: str) -> ModelAssets | None:
    """None until a leader has loaded the model once."""
    return run(client, _read_struct(ModelKeys(model).assets, ModelAssets))


def get_assets_left(client: SyncRedis, model: str) -> ModelAssets | None:
    """Those of a model that was unloaded a short time ago."""
    return run(client, _read_struct(ModelKeys(model).assets_left, ModelAssets))


def as_fields(struct: msgspec.Struct) -> dict[str, str]:
    """A struct as a hash: text as it is, everything else as JSON, None left out."""
    fields: dict[str, Any] = msgspec.to_builtins(struct)
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in fields.items()
        if value is not None
    }


@functools.cache
def _fields_of(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Their types are found by evaluating annotations."""
    return msgspec.structs.fields(kind)


def from_fields(fields: dict[str, str], kind: type[T]) -> T:
    """The struct that `as_fields` wrote; fields that this version does not know are ignored."""
    values: dict[str, Any] = {}
    for field in _fields_of(kind):
        if field.name in fields:
            text = fields[field.name]
            is_text = field.type in (str, str | None)
            values[field.name] = text if is_text else msgspec.json.decode(text, type=field.type)
        elif field.required:
            values[field.name] = None
    return msgspec.convert(values, kind)


def _flat(fields: dict[str, str]) -> list[str]:
    return [word for pair in fields.items() for word in pair]


def _read_struct(key: str, kind: type[T]) -> Call[T | None]:
    def parse(reply: dict[str, str]) -> T | None:
        return from_fields(reply, kind) if reply else None

    return read("HGETALL", key, parse=parse)


def json_records(key: str, kind: type[T]) -> Call[dict[str, T]]:
    """The records of a hash by field. One that can't be read as `kind` is left out, as of another version of Furrow."""

    def parse(reply: dict[str, str]) -> dict[str, T]:
        records: dict[str, T] = {}
        for field, text in reply.items():
            with suppress(msgspec.DecodeError):
                records[field] = msgspec.json.decode(text, type=kind)
        return records

    return read("HGETALL", key, parse=parse)
