"""Stops a model's leader for a moment at a client's word, so that a check can see its stream fall silent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from control.keys import ModelKeys
from control.redis.clients import SyncRedis
from control.redis.connection import connect

KEEP_ALIVE_S = 0.1
"""Silence after which the API of such a run sends a comment: a pause holds several."""
PAUSE_S = 0.6
REPLICA = "r0"


@contextmanager
def pausing(redis_url: str, model: str) -> Generator[str]:
    """Yields a URL: a POST to it returns once the leader of `model` is stopped, PAUSE_S before it goes on.

    The leader must run on this machine.
    """
    client = connect(redis_url)
    threads: list[threading.Thread] = []

    class Pauses(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            pid = leader_pid(client, model)
            os.kill(pid, signal.SIGSTOP)
            threads.append(threading.Thread(target=_go_on, args=(pid,)))
            threads[-1].start()
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pauses)
    listening = threading.Thread(target=server.serve_forever, args=(0.05,))
    listening.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        for thread in (listening, *threads):
            thread.join()
        client.close()


def leader_pid(client: SyncRedis, model: str) -> int:
    """The process of rank 0, as its heartbeat says. Raises LookupError where there is none."""
    pid = client.hget(ModelKeys(model).replica(REPLICA).heartbeat(0), "pid")
    if pid is None:
        raise LookupError(f"Model {model!r} has no leader whose heart beats.")
    return int(pid)


def _go_on(pid: int) -> None:
    time.sleep(PAUSE_S)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
