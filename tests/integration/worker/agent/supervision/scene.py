"""A supervisor with a scripted agent and scripted ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import until

AGENT = """
# An agent that writes down what it was welcomed with, does what the file of requests says, and obeys a stop.
import json, os, socket, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
if (folder / "broken").exists():
    sys.exit(3)
link = socket.socket(fileno=0)
lines = link.makefile("rwb")
welcome = json.loads(lines.readline())
with (folder / "agents").open("a") as out:
    out.write(json.dumps({"pid": os.getpid(), **welcome}) + "\\n")
requests = folder / "requests"
if requests.exists():
    lines.write(requests.read_bytes())
    requests.unlink()
if (folder / "dies").exists():
    lines.flush()
    os._exit(9)
lines.write(b'{"op":"alive"}\\n')
lines.flush()
for line in lines:
    if json.loads(line)["event"] == "stop":
        sys.exit(0)
"""

SUPERVISOR = """
import ctypes, sys
from worker.agent.supervision import supervisor
from worker.agent.supervision.supervisor import SupervisorLimits
supervisor.TICK_S = 0.02
supervisor.AGENT_SILENT_S = float(sys.argv[4])
ctypes.CDLL(None).prctl(36, 1)  # as process 1: orphans become its children
limits = SupervisorLimits(absent_s=float(sys.argv[3]), stop_s=20.0)
sys.exit(supervisor.HostSupervisor([sys.executable, "-S", sys.argv[1], sys.argv[2]], limits).run())
"""

RANK = """trap 'echo {name} >> {folder}/ended; exit 0' TERM; touch {folder}/up-{name}; while :; do sleep 0.02; done"""


class Scene:
    """A supervisor that starts AGENT; `request` queues what the next agent asks for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "agent.py").write_text(AGENT)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, absent_s: float = 1e6, silent_s: float = 1e6) -> None:
        command = [sys.executable, "-c", SUPERVISOR, str(self.folder / "agent.py"), str(self.folder)]
        self.process = subprocess.Popen([*command, str(absent_s), str(silent_s)])

    @property
    def supervisor(self) -> psutil.Process:
        assert self.process is not None
        return psutil.Process(self.process.pid)

    def request(self, *requests: Any) -> None:
        text = "".join(json.dumps(request) + "\n" for request in requests)
        part = self.folder / "requests.part"
        part.write_text(text)
        part.rename(self.folder / "requests")  # whole, as an agent may be about to read it

    def rank(self, name: str, order: int = 0) -> dict[str, Any]:
        """A request for a rank that writes down when it is told to end."""
        argv = ["sh", "-c", RANK.format(name=name, folder=self.folder)]
        tag, ending = {"name": name}, [order, signal.SIGTERM]
        words = {"env": dict(os.environ), "tag": tag, "ending": ending, "channel": False}
        return {"op": "spawn", "id": 1, "argv": argv, **words}

    def agents(self) -> list[dict[str, Any]]:
        """Every agent that was there, with its welcome."""
        path = self.folder / "agents"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def nth_agent(self, count: int) -> dict[str, Any]:
        """The welcome of agent number `count`, once it is there."""
        return until(lambda: (agents := self.agents())[count - 1 :] and agents[count - 1], 40.0)

    def up(self, *names: str) -> None:
        until(lambda: all((self.folder / f"up-{name}").exists() for name in names), 40.0)

    def ended(self) -> list[str]:
        path = self.folder / "ended"
        return path.read_text().split() if path.exists() else []

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            children = self.supervisor.children(recursive=True)
            self.process.kill()
            self.process.wait()
            for child in children:
                if child.is_running():
                    child.kill()
