"""Faults of a model's leader at a client's word, so that a check can see how its stream goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil

from control.keys import ModelKeys
from control.redis.clients import SyncRedis
from control.redis.connection import connect
from control.replicas import health
from ops.common.waiting import until

KEEP_ALIVE_S = 0.1
"""Silence after which the API of such a run sends a comment: a stopped leader causes several."""
PAUSE_S = 0.6
BUSY_WITHIN_S = 60.0
REPLICA = "r0"


@contextmanager
def leader_faults(redis_url: str, model: str) -> Generator[str]:
    """Yields a base URL whose paths answer with the pid of the leader of `model`, which must run on this machine.

    GET asks for it. POST /pause stops the leader for PAUSE_S, POST /kill kills it and returns when it is dead;
    with ?busy both wait for a request that runs.
    """
    client = connect(redis_url)
    threads: list[threading.Thread] = []

    class Faults(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(leader_pid(client, model))

        def do_POST(self) -> None:
            path, _, query = self.path.partition("?")
            if query == "busy":
                running = ModelKeys(model).replica(REPLICA).running
                until(lambda: client.zcard(running) > 0, "the leader runs a request", BUSY_WITHIN_S, 0.005)
            pid = leader_pid(client, model)
            if path == "/kill":
                os.kill(pid, signal.SIGKILL)
                until(lambda: not psutil.pid_exists(pid), "the leader is dead", BUSY_WITHIN_S, 0.005)
            else:
                os.kill(pid, signal.SIGSTOP)
                threads.append(threading.Thread(target=_go_on, args=(pid,)))
                threads[-1].start()
            self._answer(pid)

        def _answer(self, pid: int) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(str(pid).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Faults)
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
    beat = health.heartbeats(client, model, REPLICA, 1)[0]
    if beat is None:
        raise LookupError(f"Model {model!r} has no leader whose heart beats.")
    return beat.pid


def _go_on(pid: int) -> None:
    time.sleep(PAUSE_S)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
