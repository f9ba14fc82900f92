"""No script's work grows with what is stored: counted at two sizes, and looked for in the scripts' text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from control import requests, scripts
from control.constants import HAND_OUT
from control.messages import LogEntry
from control.redis.connection import connect_blocking, run_steps
from control.requests import Emission
from control.scripts import SCRIPTS, Script
from tests.contract.conftest import MODEL, Farm
from tests.contract.crowd import CASES, OWN, Crowd, Make
from tests.servers import NEW, serving

SMALL, LARGE = 80, 400
"""Of everything; both more than any batch, so that each batch is full."""
HOME, STORED = 0, {SMALL: 1, LARGE: 2}
"""Databases: where scripts run, and where a crowd of each size is kept."""
MORE_COMMANDS, MORE_BYTES = HAND_OUT, 1_500
"""Bound of a call's growth at the larger size: one command more for each request, and longer names."""
REPLICA_BYTES = 20
"""Of one replica in a hash that has a field for each."""

COPY = """
redis.call('SELECT', ARGV[2])
redis.call('FLUSHDB')
redis.call('SELECT', ARGV[1])
for _, key in ipairs(redis.call('KEYS', '*')) do
  redis.call('COPY', key, key, 'DB', ARGV[2])
end
"""
COUNT_BYTES = """
local function bytes_of(reply)
  if type(reply) ~= 'table' then
    return type(reply) == 'string' and #reply or 8
  end
  local sum = 8
  for _, item in pairs(reply) do
    sum = sum + bytes_of(item)
  end
  return sum
end
local function counted(run)
  return function(...)
    local reply = run(...)
    redis.call('INCRBY', 'bytes-read', bytes_of(reply))
    return reply
  end
end
local plain = redis
local redis = setmetatable({call = counted(plain.call), pcall = counted(plain.pcall)}, {__index = plain})
"""
"""In front of a script: what its commands answer it is counted, so a walk over one large answer shows."""
FOLDER = Path(scripts.__file__).parent
READS_REPLICAS = {
    ("adopt", "of other weights"),
    ("takeover", "of other weights"),
    ("claim", "of other weights"),
    ("suspect", "two inherited"),
}
"""Calls that read a hash with a field for each of the model's replicas, once: see ALLOWED."""
REFUSED = ("LOST", "FENCED", "POISONED", "ABSENT", "MOVED", "OTHER", "LAPSED", "BUSY", "CONFLICT", "LIMIT")


@dataclass(frozen=True, slots=True)
class Work:
    """Of one call of a script: commands by the server's count, bytes that they answered, bytes of its own answer."""

    commands: int
    read: int
    answered: int


class Crowds:
    """A crowd of each size, built once and put back before each call."""

    def __init__(self, farm: Farm) -> None:
        self.farm = farm
        self._scenes = {size: self._build(size) for size in STORED}

    def _build(self, size: int) -> Crowd:
        scene = Crowd(self.farm, size)
        self._copy(HOME, STORED[size])
        return scene

    def _copy(self, source: int, target: int) -> None:
        self.farm.blocking.execute_command("EVAL", COPY, 0, source, target)

    def at(self, size: int) -> Crowd:
        """The crowd as it was when it was built."""
        self._copy(STORED[size], HOME)
        return self._scenes[size]

    def work(self, script: str, make: Make, size: int) -> Work:
        """Of the call: once to count commands, and once more, on the same crowd, to count bytes."""
        answer: Any = None

        def send(front: str = "") -> None:
            nonlocal answer
            call = make(self.at(size))
            self.farm.client.config_resetstat()
            words = (len(call.keys), *call.keys, *call.args)
            answer = self.farm.blocking.execute_command("EVAL", front + SCRIPTS[script].text, *words)

        send()
        commands = run_commands(self.farm)
        send(COUNT_BYTES)
        status = answer[0] if isinstance(answer, list) and answer else answer
        assert status not in REFUSED and answer not in (None, [0], [-1, 0]), f"it did nothing: {answer}"
        return Work(commands, int(self.farm.client.get("bytes-read") or 0), size_of(answer))


def size_of(answer: Any) -> int:
    if isinstance(answer, list):
        return 8 + sum(map(size_of, cast(list[Any], answer)))
    return len(answer) if isinstance(answer, str | bytes) else 8


def run_commands(farm: Farm) -> int:
    """Commands that the server ran since its statistics were set back, those inside scripts included."""
    stats = farm.client.info("commandstats")
    return sum(
        int(one["calls"]) for name, one in stats.items() if name not in ("cmdstat_config|resetstat", "cmdstat_eval")
    )


@pytest.fixture(scope="module")
def growing() -> Iterator[Farm]:
    """With a client that waits as long as it takes: a slow machine must not end a call in the middle of a crowd."""
    with serving(NEW) as server, closing(connect_blocking(server.url)) as client:
        yield Farm(client, client, server.url)


@pytest.fixture(scope="module")
def crowds(growing: Farm) -> Crowds:
    return Crowds(growing)


def names(case: tuple[str, str]) -> str:
    return " ".join(case).strip().replace(" ", "-")


@pytest.mark.parametrize("case", CASES, ids=names)
def test_a_call_costs_the_same_however_much_is_stored(crowds: Crowds, case: tuple[str, str]) -> None:
    """Five times of all that it could walk: the same commands, and as much read and answered, but for longer names."""
    small, large = (crowds.work(case[0], CASES[case], size) for size in STORED)
    assert large.commands <= small.commands + MORE_COMMANDS, (small, large)
    replicas = REPLICA_BYTES * (LARGE - SMALL) if case in READS_REPLICAS else 0
    assert large.read <= small.read * 1.1 + MORE_BYTES + replicas, (small, large)
    assert large.answered <= small.answered * 1.1 + MORE_BYTES, (small, large)


def test_every_script_has_a_case() -> None:
    """The folder's own list: a new script comes with a call that meets a crowd."""
    scripts = {path.stem for path in FOLDER.glob("[!_]*.lua")}
    assert scripts == {script for script, _ in CASES} and set(OWN) <= scripts


def test_the_control_sees_a_walk(crowds: Crowds) -> None:
    """Scripts that walk, with a command for each item or in one large answer: both counts show it."""
    walks = "for _, rid in ipairs(redis.call('ZRANGE', ARGV[1] .. 'orphans', 0, -1)) do redis.call('TYPE', rid) end\n"
    script = "enqueue"
    text = SCRIPTS[script].text
    mended = SCRIPTS[script]
    try:
        SCRIPTS[script] = Script(walks + text, "")
        small, large = (crowds.work(script, OWN[script]["a known tenant"], size) for size in STORED)
    finally:
        SCRIPTS[script] = mended
    assert large.commands > small.commands + 300 and large.read > small.read + 5_000


def test_a_leader_s_death_hands_out_ids_and_no_logs(growing: Farm) -> None:
    """However long the logs: an adoption's answer has the same size, and brings HAND_OUT requests at most."""
    growing.client.flushall()
    for index in range(HAND_OUT + 1):
        growing.put(f"r{index}", delivered=[LogEntry(seq, 0, 7) for seq in range(1, 40)])
    growing.claim(growing.lead())
    growing.client.delete(growing.keys.replica("r0").lock)
    lease = growing.lead(owner="two")
    first = growing.run(requests.adopt(lease))
    assert len(first.requests) == HAND_OUT and first.more
    rest = growing.run(requests.adopt(lease, first.after))
    assert len(rest.requests) == 1 and not rest.more
    assert {one.seq for one in [*first.requests, *rest.requests]} == {39}
    again = growing.run(requests.adopt(lease))
    assert again.requests == first.requests, "a repeat hands out the same"


def test_a_log_of_several_pages_is_repaired_in_each_way(growing: Farm) -> None:
    """Appended to and replaced in bounded calls; the leader that ran it is told that it is taken."""
    growing.client.flushall()
    length = 2 * requests.PAGE_ENTRIES + 7
    entries = [LogEntry(seq, 0, seq) for seq in range(1, length + 1)]
    growing.put("a", delivered=entries[:3])
    lease = growing.lead()
    growing.claim(lease)
    assert run_steps(growing.client, requests.repair(MODEL, "a", "api1", "t", entries)) == "appended"
    assert growing.log("a") == entries
    other = [*entries[:-1], LogEntry(length, 0, 1)]
    assert run_steps(growing.client, requests.repair(MODEL, "a", "api1", "t", other)) == "replaced"
    assert growing.log("a") == other and growing.field("a", "state") == "queued"
    assert growing.emit(lease, Emission("a", length + 1, [])).taken == ["a"]
    assert not growing.client.keys("*staged*")


UNBOUNDED = (
    "HGETALL",
    "HKEYS",
    "HVALS",
    "SMEMBERS",
    "LRANGE",
    "SORT",
    "KEYS",
    "SCAN",
    "HSCAN",
    "SSCAN",
    "ZSCAN",
    "XPENDING",
)
RANGES = ("XRANGE", "XREVRANGE", "XREAD", "XREADGROUP", "ZRANGE", "ZREVRANGE", "ZRANGEBYLEX", "ZRANGEBYSCORE")
FREES = ("DEL", "ZREMRANGEBYSCORE", "ZREMRANGEBYRANK", "ZREMRANGEBYLEX", "XTRIM", "LTRIM", "FLUSHDB")
"""Commands that free what they remove at once, however much that is; UNLINK hands it to another thread."""

ALLOWED = {
    (
        "_docket",
        "HKEYS', docket",
    ): "a docket for each replica that looks into a crash: at most the replicas of a model, 1,024",
    ("_weights", "HVALS', base .. 'weights'"): "a fingerprint for each replica of the model, read once in a call",
    ("follow", "HKEYS', KEYS[1]"): "the fields of one request, which the scripts name",
    ("put_spec", "HGETALL', KEYS[1]"): "the fields of a ModelSpec",
    ("stage_image", "HGETALL', KEYS[2])"): "the requests with images that have not ended: as many as queue and run",
    ("_stored", "ZRANGE', index, 0, BATCH - 1"): "a batch",
    ("_turns", "ZRANGE', turns, 0, 0"): "one",
    ("chats_page", "ZREVRANGE', KEYS[1], ARGV[1], last"): "a page",
    ("chats_page", "ZRANGE', KEYS[1], ARGV[1], last"): "a page",
    ("trim_responses", "ZRANGE', KEYS[1], 0, 0"): "one",
    ("reap", "ZRANGE', base .. 'followed:' .. ARGV[i], 0, looks - 1"): "HAND_OUT in all",
    ("claim", "ZRANGE', turns, skip, last"): "queues that the call has passed, and flows that the leader runs",
}
"""Reads without COUNT or LIMIT, by file, with what bounds them."""


def unbounded(stem: str, text: str) -> Iterator[str]:
    """The calls of a script that may read or free any amount in one command."""
    for call in re.findall(r"redis\.p?call\('(.*)", re.sub(r"(?m)^\s*--.*$", "", text)):
        command = call.partition("'")[0]
        bounded = "'COUNT'" in call or "'LIMIT'" in call
        allowed = any(stem == file and call.startswith(what) for file, what in ALLOWED)
        if not allowed and (command in UNBOUNDED + FREES or (command in RANGES and not bounded)):
            yield f"{stem}: {call}"


def test_no_script_reads_or_frees_without_a_bound() -> None:
    """Each read of a collection has a COUNT or a LIMIT, or a reason here; nothing large is freed at once."""
    texts = {path.stem: path.read_text() for path in FOLDER.glob("*.lua")}
    assert [found for stem, text in texts.items() for found in unbounded(stem, text)] == []
    for file, what in ALLOWED:
        assert f"redis.call('{what}" in texts[file], f"{file} has no {what} any more"


def test_control_a_read_without_a_bound_is_found() -> None:
    text = "local all = redis.call('HVALS', key)\nredis.pcall('DEL', key)\nredis.call('XRANGE', key, '-', '+')"
    assert len(list(unbounded("claim", text))) == 3
