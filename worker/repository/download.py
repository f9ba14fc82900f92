"""A download in a process of its own, which can be killed wherever it hangs.

Complete files are kept for the next download. The process writes one JSON object a line: its progress, and at last the
folder or the error.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from control.errors import HubNeverReached, HubUnreachable, ModelFilesAway, ModelFilesError
from control.process import child_environment, die_with_parent, name_process, python_command
from worker.repository import source
from worker.repository.download_progress import Downloaded, Tell

ERRORS: dict[str, type[ModelFilesError]] = {
    kind.__name__: kind for kind in (ModelFilesError, ModelFilesAway, HubUnreachable, HubNeverReached)
}
TIDY_S = 5.0
"""For a process that was told to end to remove the beginning of a file; then it is killed."""


class Download:
    """One download of the files of a repository. `run` and `cancel` are called by different threads."""

    def __init__(self, repository: str, revision: str, cache: Path, gguf: str | None = None) -> None:
        self._what = [repository, revision, str(cache), gguf or ""]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._cancelled = False

    def run(self, tell: Tell) -> Path:
        """Wait for its end. Raises ModelFilesError. The calling thread must stay: the process ends with it."""
        with self._lock:
            if self._cancelled:
                raise ModelFilesAway(f"The download of {self._what[0]} was cancelled.")
            command = python_command("worker", "download", *self._what)
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=child_environment()
            )
        assert process.stdout is not None
        end: dict[str, Any] = {}
        with process.stdout as lines:
            for line in lines:
                end = json.loads(line)
                if "file" in end:
                    tell(Downloaded(**end))
        status = process.wait()
        if "folder" in end:
            return Path(end["folder"])
        if "error" in end:
            raise ERRORS[end["kind"]](end["error"])
        raise ModelFilesAway(f"The process that downloads {self._what[0]} ended with status {status}.")

    def cancel(self) -> None:
        """End the process, if there is one, and start none. Returns at once."""
        with self._lock:
            self._cancelled = True
            process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            late = threading.Timer(TIDY_S, process.kill)
            late.daemon = True
            late.start()


def download_here(repository: str, revision: str, cache: str, gguf: str) -> int:
    die_with_parent()
    name_process("furrow-download")
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(1))  # files that are open are removed on the way
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the agent decides

    def say(**word: Any) -> None:
        print(json.dumps(word), flush=True)

    try:
        folder = source.download(
            repository, revision, Path(cache), lambda progress: say(**progress._asdict()), gguf or None
        )
        say(folder=str(folder))
    except ModelFilesError as error:
        say(error=str(error), kind=type(error).__name__)
        return 1
    return 0
