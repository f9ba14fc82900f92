"""Real leaders with tiny models that give vectors or scores, in threads, seen only through Redis."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from control.messages import Assignment, ModelSpec
from control.records import catalog
from control.redis.connection import connect, connect_blocking
from tests.waiting import until
from worker.leader.group_leader import GroupLeader
from worker.rank.rank_worker import RankWorker
from worker.repository import validation
from worker.repository.assets import read_assets


@contextmanager
def leading(url: str, name: str, folder: Path, owner: str = "host/1") -> Iterator[GroupLeader]:
    """A leader of the model `name`, which serves until the block ends."""
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(make(url))) for make in (connect, connect_blocking, connect)]
        spec = ModelSpec(name=name, source=str(folder))
        catalog.put_spec(clients[0], spec)
        files = validation.inspect(folder)
        leader = GroupLeader(
            (clients[0], clients[1], clients[2]),
            Assignment(spec=spec, replica="r0", ranks=[0], devices=["cpu"]),
            owner,
            files,
            read_assets(files, None),
            RankWorker(0, 1, "cpu"),
            "127.0.0.1",
        )
        thread = threading.Thread(target=leader.run, daemon=True)
        thread.start()
        try:
            until(lambda: catalog.get_assets(clients[0], name) is not None, 40)
            yield leader
        finally:
            leader.stop()
            leader.wake()
            thread.join(40)
            assert not thread.is_alive()
