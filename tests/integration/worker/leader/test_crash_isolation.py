"""Requests that crash their group are buried alone: with a tiny real model; nobody else is harmed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from control import requests
from control.commands import GenerateStep
from control.errors import CollectiveFailed
from control.redis.connection import run
from control.replicas import health
from control.replicas.health import write_poison
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.waiting import until
from worker.engine.step import Step
from worker.leader.crash_isolation import CrashIsolation
from worker.leader.serving import Serving

MARK = [99, 98, 99]
"""A prompt with this crashes whatever group feeds it."""
TOKENS = 8


class Gone(BaseException):
    """The leader's process has died of itself: no code of it runs any more, and its agent has seen that."""


def prompts_of(command: GenerateStep) -> list[list[int]]:
    """The tokens of its rows."""
    return [row.tokens for row in command.change.rows]


class CrashScene(LeaderScene):
    """A leader whose process is started again when it dies; `strike` may end the step that comes."""

    def __init__(self, redis: ReplicaRedis, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.strike: Callable[[GenerateStep], None] = lambda command: None
        real = Step.forward

        def forward(step: Step, *how: Any) -> Any:
            if prompts_of(step.command) != [[0]]:  # the group's own proof that it works belongs to no request
                self.strike(step.command)
            return real(step, *how)

        monkeypatch.setattr(Step, "forward", forward)
        super().__init__(redis, folder, kv_tokens=4000)

    def _run(self) -> None:
        try:
            super()._run()
        except Gone:
            self.start()

    def ask_all(self, prompts: dict[str, list[int]]) -> None:
        """All at once, so that one claim takes them and one step feeds them."""
        self.stop()
        for rid, prompt in prompts.items():
            self.ask(rid, prompt, max_tokens=TOKENS)
        self.start()

    def answers(self, rids: list[str]) -> dict[str, list[int | None]]:
        return {rid: self.answer(rid) for rid in rids}

    def undisturbed(self, prompts: dict[str, list[int]]) -> dict[str, list[int | None]]:
        """The answers to the good requests of `prompts` where nothing crashes."""
        for rid, prompt in innocents(prompts).items():
            self.ask(f"{rid}-undisturbed", prompt, max_tokens=TOKENS)
        return {rid: self.answer(f"{rid}-undisturbed") for rid in innocents(prompts)}

    @property
    def crashes(self) -> int:
        return len(run(self.redis.client, health.poison_history(MODEL, REPLICA)))

    def buried(self) -> list[str]:
        return [letter.rid for letter in run(self.redis.client, requests.dead_letters(MODEL))]

    def nothing_left(self) -> bool:
        """No request is marked any more, and the docket is gone."""
        marks = [self.redis.client.hget(key, "suspect") for key in self.redis.client.scan_iter(self.keys.request("*"))]
        return marks == [None] * len(marks) and not self.redis.client.exists(self.keys.docket)


@pytest.fixture
def scene(redis: ReplicaRedis, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CrashScene]:
    scene = CrashScene(redis, folder, monkeypatch)
    yield scene
    scene.stop()


def marked(tokens: list[int]) -> bool:
    return any(tokens[i : i + len(MARK)] == MARK for i in range(len(tokens)))


def prompts(count: int, *culprits: int) -> dict[str, list[int]]:
    return {f"r{i:02}": [10, *MARK, i] if i in culprits else [10, 20, 30, 40, i] for i in range(count)}


def innocents(among: dict[str, list[int]]) -> dict[str, list[int]]:
    return {rid: prompt for rid, prompt in among.items() if not marked(prompt)}


def prefill_fails(command: GenerateStep) -> None:
    if any(map(marked, prompts_of(command))):
        raise MemoryError("a prompt that is not to be borne")


def dies_in_prefill(scene: CrashScene) -> Callable[[GenerateStep], None]:
    """As after a segmentation fault: the agent's word comes, then the lock is free, and no code of the leader ran."""

    def strike(command: GenerateStep) -> None:
        if any(map(marked, prompts_of(command))):
            write_poison(scene.redis.client, MODEL, REPLICA, command.epoch, 0, "crashed", "killed by SIGSEGV")
            raise Gone

    return strike


class DecodeFails:
    """The prompt goes through, and yields a token; the step after it crashes."""

    def __init__(self) -> None:
        self._fed: set[tuple[int, int]] = set()

    def __call__(self, command: GenerateStep) -> None:
        here = {sid for epoch, sid in self._fed if epoch == command.epoch}
        if here - set(command.change.left) - set(command.change.paused):
            raise MemoryError("a decode that is not to be borne")
        self._fed |= {(command.epoch, row.sid) for row in command.change.rows if marked(row.tokens)}


@pytest.mark.parametrize("count", [1, 8, pytest.param(32, marks=pytest.mark.timeout(60))])
def test_one_crasher_is_buried_and_all_others_finish(scene: CrashScene, count: int) -> None:
    """At most log2(n) + 2 restarts, exact answers, one dead letter, a clear end for its client, and no trace after."""
    own_prompts = prompts(count, 0)
    expected = scene.undisturbed(own_prompts)
    scene.strike = prefill_fails
    scene.ask_all(own_prompts)
    assert scene.answers(list(expected)) == expected
    assert scene.answer("r00") == [None]
    assert scene.crashes <= math.log2(count) + 2
    assert scene.buried() == ["r00"]
    [end] = scene.log("r00")
    assert end.finish == "error" and "also when it ran alone" in (end.cause or "") and "not to be borne" in end.cause
    assert scene.state("r00") == "dead"
    until(scene.nothing_left, 40.0)


def test_several_crashers_are_all_found(scene: CrashScene) -> None:
    """Two among eight: two dead letters, six right answers."""
    own_prompts = prompts(8, 2, 5)
    expected = scene.undisturbed(own_prompts)
    scene.strike = prefill_fails
    scene.ask_all(own_prompts)
    assert scene.answers(list(expected)) == expected
    scene.answer("r02"), scene.answer("r05")
    assert sorted(scene.buried()) == ["r02", "r05"]
    assert scene.crashes <= 2 + 2 * (3 + 1)


def test_a_crash_that_takes_the_leader_s_process_is_known_to_the_next_one(scene: CrashScene) -> None:
    """Nothing was said by the leader itself: what it wrote down before the step is enough."""
    own_prompts = prompts(8, 6)
    expected = scene.undisturbed(own_prompts)
    scene.strike = dies_in_prefill(scene)
    scene.ask_all(own_prompts)
    assert scene.answers(list(expected)) == expected
    scene.answer("r06")
    assert scene.buried() == ["r06"] and "SIGSEGV" in (scene.log("r06")[-1].cause or "")
    assert scene.crashes <= 5


def test_a_request_that_crashes_only_when_it_decodes_is_found(scene: CrashScene) -> None:
    """The token of its prefill acquits nobody."""
    own_prompts = prompts(4, 1)
    expected = scene.undisturbed(own_prompts)
    scene.strike = DecodeFails()
    scene.ask_all(own_prompts)
    assert scene.answers(list(expected)) == expected
    scene.answer("r01")
    assert scene.buried() == ["r01"]
    assert scene.crashes <= 2 + 2 + 1, "the epoch that first saw it decode may have had a token of it"


def test_new_requests_wait_for_the_isolation_and_are_served_after_it(scene: CrashScene) -> None:
    """One that comes while suspects are tried is claimed by none of the epochs that crash."""
    own_prompts = prompts(8, 0)
    scene.ask("late-undisturbed", [7, 8, 9], max_tokens=TOKENS)
    expected = scene.answer("late-undisturbed")

    def strike(command: GenerateStep) -> None:
        if scene.crashes == 2 and scene.state("late") is None:
            assert scene.redis.client.hget(scene.keys.request("r00"), "suspect") == "1"
            scene.ask("late", [7, 8, 9], max_tokens=TOKENS)
        prefill_fails(command)

    scene.strike = strike
    scene.ask_all(own_prompts)
    until(lambda: scene.state("late"), 40.0)
    assert scene.answer("late") == expected
    assert scene.buried() == ["r00"]
    assert scene.redis.client.hget(scene.keys.request("late"), "attempts") == "1"


def killed(scene: CrashScene, command: GenerateStep) -> None:
    """Another rank was killed: its agent says so at once, and the leader meets it in the step's collective."""
    write_poison(scene.redis.client, MODEL, REPLICA, command.epoch, 1, "exited", "rank 1 was killed by SIGKILL")
    raise CollectiveFailed("connection closed by peer")


def poisoned_late(scene: CrashScene, command: GenerateStep) -> None:
    """The same, and the agent's word has not come yet."""
    raise CollectiveFailed("connection closed by peer")


def lost(scene: CrashScene, command: GenerateStep) -> None:
    """The lock ran out under the step."""
    scene.redis.lapse()


@pytest.mark.parametrize(("blow", "times"), [(killed, 5), (poisoned_late, 5), (lost, 8)])
def test_kills_from_outside_make_no_dead_letter(
    scene: CrashScene,
    blow: Callable[[CrashScene, GenerateStep], None],
    times: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every step is struck, down to a suspect that is alone, and once more there: all finish, exactly."""
    # On a busy machine too, steps overlap with emissions wherever they may.
    overlaps = property(lambda serving: serving._scheduler.has_work and not serving._isolation.watching)
    monkeypatch.setattr(Serving, "_overlaps", overlaps)
    own_prompts = prompts(4)
    expected = scene.undisturbed(own_prompts)
    left, sizes = [times], []

    def strike(command: GenerateStep) -> None:
        if left[0]:
            left[0] -= 1
            sizes.append(len(command.change.rows))
            blow(scene, command)

    scene.strike = strike
    before = scene.epoch()
    scene.ask_all(own_prompts)
    assert scene.answers(list(expected)) == expected
    assert left == [0] and scene.epoch() > before and scene.buried() == []
    if blow is lost:
        # The first of these epochs had no crash before it. It may be one step ahead of Redis when it reads of the lock.
        assert sizes in ([4] * times, [4, 0] + [4] * (times - 2))
    else:
        assert sizes == [4, 4, 2, 1, 1]


def test_without_a_crash_nothing_is_written_and_nothing_read(
    scene: CrashScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a healthy epoch cost no more than before; the first adoption pays."""
    calls: list[str] = []
    for name in ("note_suspects", "read_dockets"):
        real = getattr(requests, name)
        monkeypatch.setattr(requests, name, lambda *a, name=name, real=real: calls.append(name) or real(*a))
    scene.ask("r", [1, 2, 3], max_tokens=300)
    scene.under_way("r", tokens=50)
    assert calls == []
    scene.redis.lapse()
    scene.answer("r")
    assert calls[0] == "read_dockets" and len(calls) <= 4


def test_without_isolation_the_innocents_never_finish(scene: CrashScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where no step is written down, twelve epochs end all alike and nobody has a token."""
    monkeypatch.setattr(CrashIsolation, "before", lambda *_: None)
    scene.undisturbed({})
    scene.strike = prefill_fails
    scene.ask_all(prompts(8, 0))
    monkeypatch.setattr(scene.leader, "_rest", lambda seconds: None)
    until(lambda: scene.crashes >= 12, 40.0)
    assert all(scene.log(rid) == [] for rid in prompts(8, 0)) and scene.buried() == []


def test_without_its_proof_a_faulty_group_would_bury_a_good_request(
    scene: CrashScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the step that is nobody's: a device that fails for a while buries who happens to be there."""
    monkeypatch.setattr(Serving, "_prove", lambda _: None)
    left = [4]

    def strike(command: GenerateStep) -> None:
        if left[0]:
            left[0] -= 1
            raise MemoryError("the device is sick")

    scene.strike = strike
    scene.ask_all(prompts(1))
    scene.answer("r00")
    assert scene.buried() == ["r00"]
