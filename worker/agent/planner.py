"""The placement turn of the agent that holds the placement lock: plan, write what hosts shall do, tidy up."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from control.messages import Assignment, ModelAssets, ModelSpec, Place
from control.placement import farm
from control.placement.farm import FarmReader, FarmView
from control.placement.need import ModelNeed
from control.placement.placement import Action, Assign, Host, Unplaceable, Withdraw
from control.placement.rollout import Part, is_giving_back, is_settled, plan
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every
from control.replicas import health, lease, model_overviews
from control.requests.ending import expire_waiting
from control.requests.upkeep.stranded import StrandedRequests, abandon
from worker.agent.needs import Finder, assets_of, need_apart
from worker.agent.on_demand import OnDemand

log = structlog.get_logger()

EXPIRE_EVERY_S = 1.0
"""Interval of the search for waiting requests whose deadline has passed."""

REST_S = 1.0
"""Interval of the turns while nothing is to be done. A turn takes four round trips."""


def _first_model(view: FarmView) -> str | None:
    """The model that is placed before its need is known, so that no start waits for it: the only one that is desired,
    of which the farm has nothing but what was placed so."""
    if len(view.specs) != 1 or view.specs[0].on_demand or view.specs[0].replicas != 1:
        return None
    [spec] = view.specs
    if spec.tp > 1 and len(view.hosts) > 1:  # its ranks may be on several hosts, which share its memory evenly
        return None
    assignments_of_all = [assignment for assignments in view.by_host.values() for assignment in assignments]
    is_first = all(assignment.spec.name == spec.name and not assignment.memory for assignment in assignments_of_all)
    return spec.name if is_first and not spec.unload else None


class Planner:
    """Stateless but for its clock: any agent may take over in the next turn."""

    def __init__(self, client: SyncRedis, unplaceable: Callable[[str, str, str], None]) -> None:
        self._client = client
        self._unplaceable = unplaceable
        self._need_finder, self._assets_finder = Finder(need_apart), Finder(assets_of)
        self._uneven_finder = Finder(partial(need_apart, uneven=True))
        self._farm = FarmReader(client)
        self.on_demand = OnDemand(client)
        self._stranded = StrandedRequests(client)
        self._expired = 0.0
        self._unplaced: set[Place] = set()
        self._waits: dict[Place, str] = {}
        """Of replicas that wait for others to give memory back, what was told."""
        self._stuck: set[str] = set()
        """Models of which a replica could not be placed though nothing was leaving."""
        self._rests_until = 0.0

    def tend(self) -> bool:
        """Take a turn, unless the last one found nothing to do and was less than REST_S ago.

        True if it may have written assignments.
        """
        now = time.monotonic()
        if now < self._rests_until and not self.on_demand.called():
            return False
        unfinished = self.turn()
        self._rests_until = 0.0 if unfinished else now + REST_S
        return unfinished

    def turn(self) -> bool:
        """Bring assignments in line with the desired models; True if that is not done yet."""
        view = self._farm.read(self.on_demand.quiet)
        specs = view.specs
        by_host = view.by_host
        hosts = view.hosts
        living = {host.id for host in hosts}
        unattended = self._unattended(by_host, living)
        states: dict[str, set[Place]] = {"loaded": set(), "failed": set()}
        needs, awaited = self._needs(view)
        counts = self.on_demand.turn(view, needs, awaited, self._stuck, self._assets(view))
        settled = is_settled(specs, hosts, by_host, unattended, needs, counts)
        if not settled:
            for overview in model_overviews.overviews(self._client):
                for replica in overview.replicas:
                    states.setdefault(replica.state, set()).add((overview.model, replica.replica))
        awaited -= {name for name, count in counts.items() if count == 0}  # nothing waits for models that sleep
        if awaited:  # shares are those of all models that are to be placed
            assigned_names = {assignment.spec.name for assignments in by_host.values() for assignment in assignments}
            awaited |= {spec.name for spec in specs if spec.name not in assigned_names and not spec.unload}
        placeable = [spec for spec in specs if spec.name not in awaited]
        state = (placeable, hosts, by_host, states["loaded"], states["failed"], unattended, needs, counts)
        uses = health.kv_uses(self._client, by_host, needs) if is_giving_back(by_host) else {}
        actions = plan(*state, uses)
        unplaced = [action for action in actions if isinstance(action, Unplaceable)]
        if any(not unplaceable.waits for unplaceable in unplaced) and not uses:
            uses = health.kv_uses(self._client, by_host, needs)
            actions = plan(*state, uses) if uses else actions
            unplaced = [action for action in actions if isinstance(action, Unplaceable)]
        seeking = {
            unplaceable
            for unplaceable in unplaced
            if not unplaceable.waits and self._seeks_uneven(unplaceable, specs, hosts, needs)
        }
        unplaced = [unplaceable for unplaceable in unplaced if unplaceable not in seeking]
        making_room = any(assignment.withdrawn for assignments in by_host.values() for assignment in assignments)
        making_room = making_room or any(isinstance(action, Withdraw) for action in actions)
        making_room = making_room or any(unplaceable.waits for unplaceable in unplaced)
        for action in actions:
            if not isinstance(action, Unplaceable):
                self._write(action, by_host, living, unattended)
        self._take_back({(unplaceable.model, unplaceable.replica) for unplaceable in unplaced})
        self._stuck = set() if making_room else {unplaceable.model for unplaceable in unplaced}
        placed = [action.assignment for action in actions if isinstance(action, Assign)]
        present = [
            assignment
            for host, assignments in by_host.items()
            for assignment in assignments
            if host in living or (host, assignment.spec.name, assignment.replica) in unattended
        ]
        replicas = self._replicas(specs) if actions else view.replicas
        self._stranded.end(specs, self._retire(replicas, [*placed, *present]))
        for unplaceable in unplaced:  # after the retirement of what had its name before
            if not (unplaceable.model in counts and making_room):
                self._tell(unplaceable)
        self._tidy(specs, by_host)
        unfinished = not settled or bool(actions) or bool(awaited) or self.on_demand.waking or is_giving_back(by_host)
        return unfinished or bool(seeking) or any(spec.unload for spec in specs)

    def _seeks_uneven(
        self, unplaced: Unplaceable, specs: list[ModelSpec], hosts: list[Host], needs: dict[str, ModelNeed]
    ) -> bool:
        """True while the need of ranks with uneven shares is being found, for a replica that has no place with even
        ones. It is placed with them in the turn after."""
        spec = next(spec for spec in specs if spec.name == unplaced.model)
        need = needs.get(spec.name)
        several = sum(host.memory is not None and not host.drained and not host.devices for host in hosts)
        if spec.tp < 2 or several < spec.tp or need is None or need.revision != spec.revision or need.unit_ranks:
            return False
        over, uneven = self._uneven_finder.find(spec)
        if uneven is not None and uneven.unit_ranks:
            run(self._client, farm.put_need(spec.name, uneven))
            return True
        return not over

    def _needs(self, view: FarmView) -> tuple[dict[str, ModelNeed], set[str]]:
        """The needs of models at the revisions that are desired, as far as they are known, and the models that are not
        placed yet because theirs is being found. Nothing is looked for where no host plans its memory."""
        needs = dict(view.needs)
        awaited = set[str]()
        if all(host.memory is None for host in view.hosts):
            return {}, awaited
        first = _first_model(view)
        for spec in view.specs:
            need_now = needs.get(spec.name)
            if spec.unload or (need_now is not None and need_now.revision == spec.revision):
                continue
            if spec.name == first:  # its host tells it once it serves
                continue
            over, need = self._need_finder.find(spec)
            if need is not None:
                run(self._client, farm.put_need(spec.name, need))
                needs[spec.name] = need
            elif not over:
                awaited.add(spec.name)
        self._count_started(view, needs, awaited)
        return needs, awaited

    def _count_started(self, view: FarmView, needs: dict[str, ModelNeed], awaited: set[str]) -> None:
        """Give assignments whose ranks were started before their memory was assigned the KV tokens that the ranks took.
        While these are not known, nothing is placed beside them."""
        planned = {host.id for host in view.hosts if host.memory is not None}
        for host_id, assignments in view.by_host.items():
            for index, assignment in enumerate(assignments):
                name = assignment.spec.name
                sized = assignment.memory or assignment.kv_tokens is not None or assignment.spec.kv_tokens is not None
                if host_id not in planned or sized or assignment.withdrawn or name not in needs:
                    continue
                overview = model_overviews.overview(self._client, name)
                replica = next((status for status in overview.replicas if status.replica == assignment.replica), None)
                if replica is None or replica.state == "failed" or not any(replica.beats):
                    continue
                assets = catalog.get_assets(self._client, name)
                if replica.state == "loaded" and assets is not None:
                    assignments[index] = msgspec.structs.replace(assignment, kv_tokens=assets.kv_tokens)
                else:
                    del needs[name]
                    awaited.add(name)

    def _assets(self, view: FarmView) -> dict[str, ModelAssets | None]:
        """Of models on demand that may sleep from the start, as far as their files have been read."""
        assets_by_model: dict[str, ModelAssets | None] = {}
        for spec in view.specs:
            is_quiet = spec.name in self.on_demand.quiet  # its assets are published
            if spec.on_demand and not spec.unload and spec.least_replicas == 0 and not is_quiet:
                over, assets = self._assets_finder.find(spec)
                if over:
                    assets_by_model[spec.name] = assets
        return assets_by_model

    def _unattended(self, by_host: dict[str, list[Assignment]], living: set[str]) -> set[Part]:
        """The parts on hosts that don't beat whose ranks live all the same: only the agent there is away.

        A leader lives that renews its replica's lock, another rank that has a heartbeat.
        """
        unattended: set[Part] = set()
        for host, assignment in (
            (host, assignment)
            for host, assignments in by_host.items()
            if host not in living
            for assignment in assignments
        ):
            model = assignment.spec.name
            replica = assignment.replica
            beats = health.heartbeats(self._client, model, replica, assignment.spec.group_size)
            holder = run(self._client, lease.holder(model, replica))
            leads = 0 in assignment.ranks and holder is not None and holder.rpartition("/")[0] == host
            has_heartbeat = any(
                beat is not None and beat.host == host for rank, beat in enumerate(beats) if rank in assignment.ranks
            )
            if leads or has_heartbeat:
                unattended.add((host, model, replica))
        return unattended

    def _take_back(self, unplaced: set[Place]) -> None:
        """A reason why a replica can't be placed must not outlive itself."""
        self._waits = {place: why for place, why in self._waits.items() if place in unplaced}
        for model, replica in self._unplaced - unplaced:
            health.clear_status(self._client, model, replica)
        self._unplaced = unplaced

    def _replicas(self, specs: list[ModelSpec]) -> dict[str, list[str]]:
        """The replicas of each model in the catalog."""
        names = [spec.name for spec in specs]
        replicas = run_every(self._client, [catalog.replicas(name) for name in names])
        return {name: list(names_of_model) for name, names_of_model in zip(names, replicas, strict=True)}

    def _retire(self, replicas: dict[str, list[str]], present: list[Assignment]) -> dict[str, list[str]]:
        """Forget those of the `replicas` that no living host has: what they left behind waits for others. Returns
        those that some host has, by model."""
        present_places = {(assignment.spec.name, assignment.replica) for assignment in present}
        for model, replica in [(name, replica) for name, names in replicas.items() for replica in names]:
            if (model, replica) not in present_places:
                returned = catalog.retire(self._client, model, replica)
                if returned is not None:
                    log.info(
                        "replica retired",
                        model=model,
                        replica=replica,
                        returned_requests=returned,
                        action="replica_retire",
                    )
        return {
            name: [replica for replica in names if (name, replica) in present_places]
            for name, names in replicas.items()
        }

    def _write(
        self, action: Action, by_host: dict[str, list[Assignment]], living: set[str], unattended: set[Part]
    ) -> None:
        match action:
            case Assign(host, assignment):
                log.info(
                    "replica assigned",
                    host=host,
                    model=assignment.spec.name,
                    replica=assignment.replica,
                    action="replica_assign",
                )
                self._forget_failure(host, assignment, by_host)
                farm.assign(self._client, host, assignment)
                place = assignment.spec.name, assignment.replica
                others = [other for other in by_host.get(host, []) if (other.spec.name, other.replica) != place]
                by_host[host] = [*others, assignment]  # a withdrawal of the same plan is of what it has now
            case Withdraw(host, model, replica) if host not in living and (host, model, replica) not in unattended:
                farm.remove_assignment(self._client, host, model, replica)
            case Withdraw(host, model, replica, at_once):
                for assignment in by_host[host]:
                    if (assignment.spec.name, assignment.replica) == (model, replica) and not assignment.withdrawn:
                        log.info(
                            "replica withdrawn", host=host, model=model, replica=replica, action="replica_withdraw"
                        )
                        farm.withdraw(self._client, host, assignment, at_once)
            case Unplaceable():
                pass  # told once all is written

    def _tell(self, unplaced: Unplaceable) -> None:
        """Write the status of a replica without a place: the reason, or the memory for which it waits."""
        place = unplaced.model, unplaced.replica
        if not unplaced.waits:
            self._unplaceable(*place, unplaced.why)
        elif self._waits.get(place) != unplaced.why:
            health.write_status(self._client, *place, "starting", unplaced.why)
            self._waits[place] = unplaced.why

    def _forget_failure(self, host: str, assignment: Assignment, by_host: dict[str, list[Assignment]]) -> None:
        """A failure on another host is no reason to expect one here."""
        place = assignment.spec.name, assignment.replica
        if place not in {(assignment.spec.name, assignment.replica) for assignment in by_host.get(host, ())}:
            status = run(self._client, health.status_of(*place))
            if status is not None and status.state == "failed":
                health.clear_status(self._client, *place)

    def _tidy(self, specs: list[ModelSpec], by_host: dict[str, list[Assignment]]) -> None:
        """Forget models whose ranks have all ended, and end the requests that no leader is there to end."""
        assigned = {assignment.spec.name for assignments in by_host.values() for assignment in assignments}
        for spec in specs:
            if spec.unload and spec.name not in assigned:
                ended = abandon(self._client, spec.name, f"the model '{spec.name}' was unloaded")
                run(self._client, farm.forget_need(spec.name))
                catalog.forget(self._client, spec)  # last: what is left undone before it is done in the next turn
                self._farm.forget(spec.name)
                log.info("model unloaded", model=spec.name, ended_requests=ended, action="model_unload")
        if time.monotonic() - self._expired >= EXPIRE_EVERY_S:
            self._expired = time.monotonic()
            names = [spec.name for spec in specs if spec.name not in self.on_demand.quiet]
            for model, expired in expire_waiting(self._client, names).items():
                log.warning("waiting requests expired", model=model, requests=expired, action="expire")
