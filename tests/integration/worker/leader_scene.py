"""A leader with a tiny real model in a thread, seen only through Redis."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from control import requests
from control.keys import ModelKeys
from control.messages import Assignment, GenerationRequest, LogEntry, ModelSpec, Sampling
from control.records import catalog
from control.replicas import health
from control.requests import Enqueue
from control.requests.token_log import read_pages
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.waiting import until
from worker.leader.group_leader import GroupLeader
from worker.rank.rank_worker import RankWorker
from worker.repository import validation
from worker.repository.assets import read_assets

KV_TOKENS = 450
PROMPT = [10, 20, 30, 40]
LONG = 300


class LeaderScene:
    """One rank that leads itself, in a thread; requests go in and logs come out through Redis alone."""

    def __init__(
        self,
        redis: ReplicaRedis,
        folder: Path,
        kv_tokens: int = KV_TOKENS,
        replica: str = REPLICA,
        dtype: str = "float64",
    ) -> None:
        self.redis, self.keys, self.replica = redis, ModelKeys(MODEL), replica
        self.spec = ModelSpec(name=MODEL, source=str(folder), dtype=dtype, kv_tokens=kv_tokens)
        catalog.put_spec(redis.client, self.spec)
        self.files = validation.inspect(folder)
        self.ended: list[BaseException] = []
        self.start()

    def start(self) -> None:
        """A new process, as far as the farm can tell."""
        clients = (self.redis.another(), self.redis.blocking(), self.redis.another())
        assignment = Assignment(spec=self.spec, replica=self.replica, ranks=[0], devices=["cpu"])
        assets = read_assets(self.files, None)
        rank_worker = RankWorker(0, 1, "cpu")
        self.leader = GroupLeader(clients, assignment, "host/1", self.files, assets, rank_worker, "127.0.0.1")
        self.run_in_thread()

    def run_in_thread(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.leader.run()
        except Exception as error:
            self.ended.append(error)

    def stop(self) -> None:
        self.leader.stop()
        self.leader.wake()
        self.thread.join(40)
        assert not self.thread.is_alive() and self.ended == []

    def ask(
        self,
        rid: str,
        prompt: list[int] | None = None,
        cache_salt: str = "",
        tenant: str = "t",
        priority: str = "normal",
        keep_ms: int = 0,
        **sampling: Any,
    ) -> None:
        fields = {"max_tokens": LONG, "temperature": 0.0} | sampling
        params = GenerationRequest(prompt=prompt or PROMPT, sampling=Sampling(**fields), cache_salt=cache_salt)
        request = Enqueue(rid=rid, model=MODEL, params=params, tenant=tenant, priority=priority, keep_ms=keep_ms)
        self.redis.run(requests.enqueue(request))

    def log(self, rid: str) -> list[LogEntry]:
        return [entry for page in read_pages(self.redis.client, MODEL, rid) for entry in page]

    def texts(self, rid: str) -> dict[int, tuple[str, str | None]]:
        """Text and finish reason of a request so far, by choice."""
        tokens, finish = dict[int, list[int]](), dict[int, str | None]()
        for entry in self.log(rid):
            tokens.setdefault(entry.choice, []).extend([] if entry.token is None else [entry.token])
            finish[entry.choice] = entry.finish
        assert self.files.tokenizer is not None
        tokenizer = Tokenizer.from_file(str(self.files.tokenizer))
        return {choice: (tokenizer.decode(its), finish[choice]) for choice, its in tokens.items()}

    def state(self, rid: str) -> str | None:
        return self.redis.client.hget(self.keys.request(rid), "state")

    def under_way(self, rid: str, tokens: int = 20) -> None:
        until(lambda: self.ended or len(self.log(rid)) >= tokens, 40.0)
        assert self.ended == [] and self.state(rid) == "running", "it must be struck while it runs"

    def answer(self, rid: str) -> list[int | None]:
        """The tokens of a request, once it has ended."""
        until(lambda: self.ended or self.state(rid) not in ("queued", "running"), 40.0)
        assert self.ended == []
        return [entry.token for entry in self.log(rid)]

    def epoch(self) -> int:
        return health.read_epoch(self.redis.client, MODEL, self.replica)
