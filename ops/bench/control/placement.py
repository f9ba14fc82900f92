"""Random farms that plan their memory, and random changes: how often a host is given more than it has, or a model is
not placed that would fit."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from typing import Annotated

import click
import msgspec

from control.messages import Assignment, ModelSpec, Place
from control.placement import rebalance
from control.placement.give_back import KvUse, lenders
from control.placement.need import ModelNeed, RankNeed
from control.placement.placement import Assign, Host, Unplaceable, Withdraw
from control.placement.rollout import plan
from ops.harness.program import Figure, benchmark, run

GIB = 2**30
MOST_TURNS = 60
PER_TOKEN = 2**16
CONTEXT = 1024
VIOLATIONS = (
    "host exceeded",
    "more KV memory used than assigned",
    "less KV memory than one context",
    "host exceeded by a move",
    "not placed though it fits",
    "never settles",
    "moves for ever",
)


@benchmark
def placement(
    farms: int = 10_000,
    seed: Annotated[int, int] = 0,
) -> list[Figure]:
    """Play random farms and changes, each at the planner's functions alone; exit status 1 for any violation."""
    began = time.monotonic()
    counts: Counter[str] = Counter()
    for index in range(farms):
        counts.update(RandomFarm(random.Random(f"{seed} {index}")).play())
    seconds = time.monotonic() - began
    click.echo(
        f"{farms} farms, {counts['changes']} changes, {counts['turns']} turns in {seconds:.0f} s; "
        f"{counts['unplaced']} farms had replicas without a place, {counts['moves']} moves were made, "
        f"which placed {counts['placed by moves']} replicas; {counts['shares given back']} shares were given back"
    )
    return [Figure(name, counts[name], 0) for name in VIOLATIONS]


def _random_host(chance: random.Random, name: str) -> Host:
    """With GPUs now and then."""
    devices = tuple(f"cuda:{index}" for index in range(chance.randint(1, 3))) if chance.random() < 0.2 else ()
    return Host(
        name,
        devices,
        memory=int(chance.uniform(1, 12) * GIB),
        dedicated=chance.random() < 0.5,
        device_memory={device: int(chance.uniform(1, 12) * GIB) for device in devices},
    )


class RandomFarm:
    """Hosts with assignments alone. Replicas serve and end between turns, or not."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._hosts = {f"h{index}": _random_host(chance, f"h{index}") for index in range(chance.randint(1, 4))}
        self._specs: dict[str, ModelSpec] = {}
        self._needs: dict[str, ModelNeed] = {}
        self._assignments: dict[str, list[Assignment]] = {host: [] for host in self._hosts}
        self._serving: set[Place] = set()
        self._uses: dict[Place, KvUse] = {}
        """The KV memory of replicas: what their leaders use of it, and the limit that they keep to."""
        self._unplaced: set[str] = set()
        self._revision = 1
        self._counts: Counter[str] = Counter()

    def play(self) -> Counter[str]:
        """Make random changes and check the farm after each; the counts of changes and of violations by their names."""
        for _ in range(self._chance.randint(1, 10)):
            self._change()
            self._counts["changes"] += 1
            self._turn()
        self._settle()
        self._check_rest()
        self._rebalance()
        return self._counts

    def _change(self) -> None:
        chance = self._chance
        kinds = ("want", "want", "want", "unload", "drain", "lose", "turns")
        match chance.choice(kinds):
            case "want":
                self._revision += 1
                name = chance.choice("mno")
                tp = chance.randint(1, 3)
                per_token = chance.choice((0, PER_TOKEN))
                rank = RankNeed(
                    weights=int(chance.uniform(0.1, 6) * GIB), kv=0, step=0, process=0, bytes_per_token=per_token
                )
                on_gpu = msgspec.structs.replace(rank, weights=int(rank.weights * chance.uniform(0.5, 1.5)))
                self._needs[name] = ModelNeed(
                    revision=self._revision, context=CONTEXT, ranks=[rank] * tp, gpu_ranks=[on_gpu] * tp
                )
                replicas = chance.randint(1, 3)
                surge = chance.random() < 0.5
                self._specs[name] = ModelSpec(
                    name=name, source="/m", tp=tp, replicas=replicas, surge=surge, revision=self._revision
                )
            case "unload" if self._specs:
                name = chance.choice(sorted(self._specs))
                self._specs[name] = msgspec.structs.replace(self._specs[name], unload=True)
            case "drain":
                host = self._hosts[chance.choice(sorted(self._hosts))]
                self._hosts[host.id] = replace(host, drained=not host.drained)
            case "lose" if len(self._hosts) > 1:
                del self._hosts[lost := chance.choice(sorted(self._hosts))]
                self._turn()
                self._assignments[lost] = []
            case _:
                for _ in range(chance.randint(1, 3)):
                    self._turn()
                    self._serving |= self._places()

    def _turn(self, *, idle: bool = False) -> None:
        self._counts["turns"] += 1
        self._unplaced = set()
        self._lead(idle=idle)
        for action in plan(*self._state(), self._serving, needs=self._needs, uses=dict(self._uses)):
            match action:
                case Assign(host, assignment):
                    place = assignment.place
                    others = [other for other in self._assignments[host] if other.place != place]
                    before = next((previous for previous in self._assignments[host] if previous not in others), None)
                    if before is None:  # its processes start anew
                        self._uses.pop(place, None)
                    elif (assignment.kv_tokens or 0) < (before.kv_tokens or 0):
                        self._counts["shares given back"] += 1
                    self._assignments[host] = [*others, assignment]
                case Withdraw(host, model, replica):
                    self._assignments[host] = [
                        msgspec.structs.replace(assignment, withdrawn=True)
                        if assignment.place == (model, replica)
                        else assignment
                        for assignment in self._assignments[host]
                    ]
                    self._serving.discard((model, replica))
                case Unplaceable(model, waits=False):
                    self._unplaced.add(model)
                case Unplaceable():
                    pass
        self._check(self._assignments, "host exceeded")
        self._check_limits()

    def _lead(self, *, idle: bool = False) -> None:
        """Leaders use some of their KV memory, and may lower their limits to what they are asked for. A process that
        dies begins anew with the limit of its assignment."""
        there: dict[Place, Assignment] = {}
        for own in self._assignments.values():
            there |= {assignment.place: assignment for assignment in own if assignment.kv_tokens is not None}
        self._uses = {place: use for place, use in self._uses.items() if place in there}
        for place, assignment in there.items():
            assert assignment.kv_limit is not None and assignment.kv_tokens is not None
            before = self._uses.get(place)
            limit = assignment.kv_limit if before is None else before.limit
            used = 0 if idle else int(limit * self._chance.random() ** 3)
            target = min(limit, assignment.kv_limit)
            if idle or self._chance.random() < 0.5:  # else it has not looked yet
                limit = max(target, used)
            self._uses[place] = KvUse(used=used, limit=limit)

    def _check_limits(self) -> None:
        """No leader has more than its assignment, nor less than one sequence of the whole context."""
        for own in self._assignments.values():
            for assignment in own:
                use = self._uses.get(assignment.place)
                if use is not None and assignment.kv_tokens is not None and use.limit > assignment.kv_tokens:
                    self._counts["more KV memory used than assigned"] += 1
                if assignment.kv_limit is not None and assignment.kv_limit < CONTEXT:
                    self._counts["less KV memory than one context"] += 1

    def _settle(self) -> None:
        """Until nothing changes, with leaders that use nothing and look at once."""
        for _ in range(MOST_TURNS):
            before = {host: list(own) for host, own in self._assignments.items()}, set(self._serving), dict(self._uses)
            self._turn(idle=True)
            self._serving |= self._places()
            self._assignments = {
                host: [assignment for assignment in own if not assignment.withdrawn]
                for host, own in self._assignments.items()
            }
            self._serving &= self._places()
            if before == (self._assignments, self._serving, self._uses):
                return
        self._counts["never settles"] += 1

    def _check_rest(self) -> None:
        """Of what is unplaced, nothing fits on one host, with what others there could give back."""
        self._counts["unplaced"] += bool(self._unplaced)
        hosts = [host for host in self._hosts.values() if not host.drained]
        largest = max((self._left(host) for host in hosts if not host.devices), default=0)
        for name in self._unplaced:
            need = self._needs[name]
            each = max(rank.least + CONTEXT * rank.bytes_per_token for rank in need.gpu_ranks)
            rooms = [[self._left_on(host, device) for device in host.devices] for host in hosts]
            on_gpus = any(sum(size >= each for size in own) >= len(need.ranks) for own in rooms)
            if sum(need.bytes_with(CONTEXT)) <= largest or on_gpus:
                self._counts["not placed though it fits"] += 1

    def _rebalance(self) -> None:
        farm = rebalance.Farm(*self._state(), self._needs, {})
        before = farm.unplaced()
        for _ in range(rebalance.MOST_MOVES):
            move = farm.next_move()
            if move is None:
                break
            self._counts["moves"] += 1
            began = farm.after(move)
            farm = began.without_old(move).settled()
            for state in (began, began.settled(), farm):
                self._check(state.by_host, "host exceeded by a move")
        else:
            self._counts["moves for ever"] += 1
        rest = farm.unplaced()
        self._counts["placed by moves"] += len(before) - len(rest)

    def _state(self) -> tuple[list[ModelSpec], list[Host], dict[str, list[Assignment]]]:
        return list(self._specs.values()), list(self._hosts.values()), self._assignments

    def _places(self) -> set[Place]:
        return {
            assignment.place for own in self._assignments.values() for assignment in own if not assignment.withdrawn
        }

    def _left(self, host: Host) -> int:
        """Beside all that replicas have, but for what they could give back."""
        room = (host.memory or 0) - sum(sum(assignment.memory) for assignment in self._assignments[host.id])
        for place, parts in lenders(self._assignments, self._needs).items():
            part = parts.get(host.id)
            if part is not None and part.kv_tokens is not None:
                least = max(CONTEXT, self._uses[place].used if place in self._uses else part.kv_tokens)
                room += max(0, part.kv_tokens - least) * len(part.ranks) * PER_TOKEN
        return room

    def _left_on(self, host: Host, device: str, assignments: dict[str, list[Assignment]] | None = None) -> int:
        """Of a GPU; nothing beside a rank whose need was not known any more."""
        sizes = [
            size
            for assignment in (assignments or self._assignments)[host.id]
            for size, own in zip(assignment.device_memory, assignment.devices, strict=False)
            if own == device
        ]
        return host.device_memory[device] - sum(sizes) if all(sizes) else 0

    def _check(self, assignments: dict[str, list[Assignment]], violation: str) -> None:
        for host in self._hosts.values():
            if sum(sum(assignment.memory) for assignment in assignments[host.id]) > (host.memory or 0):
                self._counts[violation] += 1
            if any(self._left_on(host, device, assignments) < 0 for device in host.devices):
                self._counts[violation] += 1


if __name__ == "__main__":
    run(placement)
