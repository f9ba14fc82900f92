"""Becomes a Redis-compatible server that can't outlive its parent. Run as a plain script: PARENT_PID BINARY CONFIG.

Linux: the kernel is asked to kill this process when the thread that started it ends, and that survives the exec that
follows. Elsewhere this process stays, holds the reading end of a pipe whose other end dies with the parent, and then
ends the server. It imports nothing of Furrow, so that it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from types import FrameType

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    """Never returns on Linux; elsewhere returns the server's exit status."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel knew
            return 1
        os.execv(command[0], command)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        server.terminate()

    signal.signal(signal.SIGTERM, stop)

    def watch() -> None:
        sys.stdin.buffer.read()  # returns when the parent is gone
        server.kill()

    threading.Thread(target=watch, daemon=True).start()
    return server.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
