"""Operations on a model's specification: load, change, restart, scale, pause and unload."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from control.errors import ModelNotFound, SettingsError
from control.messages import ModelSpec
from control.operations.spec import Scale
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.replicas import model_overviews


@dataclass(frozen=True, slots=True)
class Desired:
    """`before` is the revision that was desired until now, 0 for a model that is new."""

    revision: int
    before: int
    changed: bool = True


def load(client: SyncRedis, spec: ModelSpec, scale: Scale | None) -> Desired:
    """Make `spec` the desired state; `scale` None: as it is now, or 1. One that has failed is tried again.

    `changed` is False where exactly that is desired already, and nothing is done then. Raises SettingsError for a model
    that is on its way out.
    """
    present = catalog.get_spec(client, spec.name)
    if present is not None:
        check_stays(present)
    if present is not None:
        present_scale = {"replicas": present.replicas, "min_replicas": present.min_replicas, "paused": present.paused}
        spec = msgspec.structs.replace(spec, **present_scale)
    if scale is not None:
        spec = msgspec.structs.replace(spec, **scale.fields)
    failed = model_overviews.overview(client, spec.name).state == "failed"
    if present is not None and catalog.same(present, spec) and not failed:
        catalog.enter_name(client, spec.name)  # the load that wrote it may have been cut off
        return Desired(present.revision, present.revision, changed=False)
    before = present.revision if present is not None else 0
    return Desired(catalog.put_spec(client, spec, again=failed), before)


def reload(client: SyncRedis, name: str) -> int:
    """Have every replica started anew, one by one; the new revision. Raises as `find_spec`."""
    return catalog.put_spec(client, find_spec(client, name), again=True)


def scale(client: SyncRedis, name: str, to: Scale) -> None:
    """Run so many copies. Raises as `find_spec`."""
    catalog.put_spec(client, msgspec.structs.replace(find_spec(client, name), **to.fields))


def pause(client: SyncRedis, name: str, *, paused: bool) -> bool:
    """Let leaders claim no request of the model, or claim again; False if that is so already. Raises as `find_spec`.

    A paused model takes requests into its queue. Requests that run are finished.
    """
    spec = find_spec(client, name)
    if spec.paused == paused:
        return False
    catalog.put_spec(client, msgspec.structs.replace(spec, paused=paused))
    if not paused:
        run(client, catalog.ring(name, "resumed"))
    return True


def unload(client: SyncRedis, name: str) -> None:
    """Take the model out once its requests are finished. Raises ModelNotFound."""
    if not catalog.tombstone(client, name):
        raise ModelNotFound(name, [one.name for one in catalog.list_specs(client)])
    catalog.enter_name(client, name)  # the load that wrote it, or an unload before, may have been cut off


def find_spec(client: SyncRedis, name: str) -> ModelSpec:
    """Raises ModelNotFound, or SettingsError for one that is on its way out."""
    spec = catalog.get_spec(client, name)
    if spec is None:
        raise ModelNotFound(name, [one.name for one in catalog.list_specs(client)])
    check_stays(spec)
    return spec


def check_stays(spec: ModelSpec) -> None:
    """Raises SettingsError where the model is being unloaded."""
    if spec.unload:
        raise SettingsError(
            f"model '{spec.name}' is being unloaded; wait until `furrow models list` no longer shows it"
        )
