"""Random farms that plan their memory, and random changes: how often a host is given more than it has, or a model is
not placed that would fit."""

from __future__ import annotations

import random
import time
from collections import Counter

import click
import msgspec

from control.messages import Assignment, ModelSpec
from control.placement import rebalance
from control.placement.need import ModelNeed, RankNeed
from control.placement.placement import Assign, Host, Unplaceable, Withdraw
from control.placement.rollout import Place, plan
from ops.bench import program
from ops.bench.common.figures import Figure, conclude

GIB = 2**30
MOST_TURNS = 60
PER_TOKEN = 2**16
CONTEXT = 1024
VIOLATIONS = (
    "host exceeded",
    "host exceeded by a move",
    "not placed though it fits",
    "never settles",
    "moves for ever",
)


@click.command()
@click.option("--farms", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def placement(farms: int, seed: int) -> None:
    """Play random farms and changes, each at the planner's functions alone; exit status 1 for any violation."""
    began = time.monotonic()
    counts: Counter[str] = Counter()
    for index in range(farms):
        counts.update(RandomFarm(random.Random(f"{seed} {index}")).play())
    seconds = time.monotonic() - began
    click.echo(
        f"{farms} farms, {counts['changes']} changes, {counts['turns']} turns in {seconds:.0f} s; "
        f"{counts['unplaced']} farms had replicas without a place, {counts['moves']} moves were made, "
        f"which placed {counts['placed by moves']} replicas"
    )
    conclude([Figure(name, counts[name], 0) for name in VIOLATIONS])


class RandomFarm:
    """Hosts with assignments alone. Replicas serve and end between turns, or not."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._hosts = {
            f"h{index}": Host(f"h{index}", memory=int(chance.uniform(1, 12) * GIB))
            for index in range(chance.randint(1, 4))
        }
        self._specs: dict[str, ModelSpec] = {}
        self._needs: dict[str, ModelNeed] = {}
        self._held: dict[str, list[Assignment]] = {host: [] for host in self._hosts}
        self._serving: set[Place] = set()
        self._unplaced: set[str] = set()
        self._revision = 1
        self._counts: Counter[str] = Counter()

    def play(self) -> Counter[str]:
        """What was counted, violations by their names."""
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
                name, tp, per_token = chance.choice("mno"), chance.randint(1, 3), chance.choice((0, PER_TOKEN))
                rank = RankNeed(
                    weights=int(chance.uniform(0.1, 6) * GIB), kv=0, step=0, process=0, bytes_per_token=per_token
                )
                self._needs[name] = ModelNeed(revision=self._revision, context=CONTEXT, ranks=[rank] * tp)
                replicas, surge = chance.randint(1, 3), chance.random() < 0.5
                self._specs[name] = ModelSpec(
                    name=name, source="/m", tp=tp, replicas=replicas, surge=surge, revision=self._revision
                )
            case "unload" if self._specs:
                name = chance.choice(sorted(self._specs))
                self._specs[name] = msgspec.structs.replace(self._specs[name], unload=True)
            case "drain":
                host = self._hosts[chance.choice(sorted(self._hosts))]
                self._hosts[host.id] = Host(host.id, memory=host.memory, drained=not host.drained)
            case "lose" if len(self._hosts) > 1:
                del self._hosts[lost := chance.choice(sorted(self._hosts))]
                self._turn()
                self._held[lost] = []
            case _:
                for _ in range(chance.randint(1, 3)):
                    self._turn()
                    self._serving |= self._places()

    def _turn(self) -> None:
        self._counts["turns"] += 1
        self._unplaced = set()
        for action in plan(*self._state(), self._serving, needs=self._needs):
            match action:
                case Assign(host, assignment):
                    place = assignment.spec.name, assignment.replica
                    others = [one for one in self._held[host] if (one.spec.name, one.replica) != place]
                    self._held[host] = [*others, assignment]
                case Withdraw(host, model, replica):
                    self._held[host] = [
                        msgspec.structs.replace(one, withdrawn=True)
                        if (one.spec.name, one.replica) == (model, replica)
                        else one
                        for one in self._held[host]
                    ]
                    self._serving.discard((model, replica))
                case Unplaceable(model):
                    self._unplaced.add(model)
        self._check(self._held, "host exceeded")

    def _settle(self) -> None:
        for _ in range(MOST_TURNS):
            before = {host: list(own) for host, own in self._held.items()}, set(self._serving)
            self._turn()
            self._serving |= self._places()
            self._held = {host: [one for one in own if not one.withdrawn] for host, own in self._held.items()}
            self._serving &= self._places()
            if before == (self._held, self._serving):
                return
        self._counts["never settles"] += 1

    def _check_rest(self) -> None:
        """Of what is unplaced, nothing fits on one host."""
        self._counts["unplaced"] += bool(self._unplaced)
        largest = max((self._left(host) for host in self._hosts.values() if not host.drained), default=0)
        for name in self._unplaced:
            if sum(self._needs[name].bytes_with(CONTEXT)) <= largest:
                self._counts["not placed though it fits"] += 1

    def _rebalance(self) -> None:
        specs, hosts = self._state()[:2]
        held = self._held
        before = rebalance.unplaced(specs, hosts, held, self._needs, {})
        for _ in range(rebalance.MOST_MOVES):
            move = rebalance.next_move(specs, hosts, held, self._needs, {})
            if move is None:
                break
            self._counts["moves"] += 1
            began = rebalance.after(held, move)
            self._check(began, "host exceeded by a move")
            self._check(rebalance.settled(specs, hosts, began, self._needs, {}), "host exceeded by a move")
            held = rebalance.settled(specs, hosts, rebalance.without_old(began, move), self._needs, {})
            self._check(held, "host exceeded by a move")
        else:
            self._counts["moves for ever"] += 1
        rest = rebalance.unplaced(specs, hosts, held, self._needs, {})
        self._counts["placed by moves"] += len(before) - len(rest)

    def _state(self) -> tuple[list[ModelSpec], list[Host], dict[str, list[Assignment]]]:
        return list(self._specs.values()), list(self._hosts.values()), self._held

    def _places(self) -> set[Place]:
        return {(one.spec.name, one.replica) for own in self._held.values() for one in own if not one.withdrawn}

    def _left(self, host: Host) -> int:
        return (host.memory or 0) - sum(sum(one.memory) for one in self._held[host.id])

    def _check(self, held: dict[str, list[Assignment]], violation: str) -> None:
        for host in self._hosts.values():
            if sum(sum(one.memory) for one in held[host.id]) > (host.memory or 0):
                self._counts[violation] += 1


if __name__ == "__main__":
    program.run(placement)
