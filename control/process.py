"""Child processes: their command and environment, their end with the parent, and their name."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAM_VARIABLE = "FURROW_PROGRAM"
"""Environment variable of the processes that `furrow` starts: the words of `program` as JSON."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Arrange that this process ends when its parent does, kill -9 included. Call first thing in a child's main.

    Linux: the kernel sends SIGKILL (prctl PR_SET_PDEATHSIG), bound to the parent *thread* that forked, so a parent
    must spawn from a thread that lives as long as itself. Elsewhere a thread watches for a change of parent.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        expected = os.environ.get("FURROW_PARENT")
        if expected is not None and int(expected) != os.getppid():  # it died before the call above
            os._exit(0)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose own parent ends (prctl PR_SET_CHILD_SUBREAPER). Linux only;
    elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show for this process, at most 15 characters. Only Linux has it.

    Call it in the main thread: other threads have names of their own.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def give_back_memory() -> None:
    """Return freed memory to the system, after work that took much for a moment. Only glibc has such a call; it takes
    some milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def python_command(module: str, *arguments: str) -> list[str]:
    """The command of a child process of the same build. It imports nothing from the working folder, whose files are the
    user's."""
    return [_pinned(sys.executable), "-P", "-m", module, *arguments]


@functools.cache
def _pinned(executable: str) -> str:
    """The interpreter by its folder's own name, as a link to the folder may lead to another build tomorrow. The
    interpreter of a virtual environment is a link itself, which must stay."""
    path = Path(executable)
    return str(path.parent.resolve() / path.name)


_pinned(sys.executable)  # while the link still leads to this build


def program(words: Sequence[str] = sys.orig_argv, argv: Sequence[str] = sys.argv) -> list[str]:
    """The command that started this process, without its arguments, as a later process can run it: a console script by
    its own path, whose first line names the interpreter anew; else the interpreter with its options. Links stay as
    they were typed, so that it starts whatever they lead to then.

    `words` and `argv` are those of `sys`.
    """
    command = list(words[: len(words) - len(argv) + 1])
    if command[-1] == argv[0] and os.access(argv[0], os.X_OK):
        return [_absolute(argv[0])]
    return [_absolute(shutil.which(command[0]) or sys.executable), *command[1:]]


def _absolute(path: str) -> str:
    """An absolute path, with the links of the shell's working folder in it."""
    folder = Path(os.environ.get("PWD", ""))
    named = folder.is_absolute() and folder.is_dir() and folder.samefile(".")
    return str((folder if named else Path.cwd()) / path)


def remember_program() -> None:
    """Tell the processes that this one starts, or becomes, by which command they can be started anew."""
    os.environ[PROGRAM_VARIABLE] = json.dumps(program())


def remembered_program() -> list[str]:
    """The program that `remember_program` stored; empty where no `furrow` command started this process."""
    try:
        words = json.loads(os.environ.get(PROGRAM_VARIABLE) or "[]")
    except ValueError:
        return []
    return [str(word) for word in words] if isinstance(words, list) else []


def child_environment(**extra: str) -> dict[str, str]:
    """The environment for a child that will call `die_with_parent`."""
    return {**os.environ, "FURROW_PARENT": str(os.getpid()), **extra}


def hide_argument(secret: str) -> None:
    """Overwrite `secret` in this process's command line as `ps` shows it. Linux only; elsewhere nothing happens."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin = int(fields[45])
        end = int(fields[46])  # arg_start and arg_end, the 48th and 49th of all fields
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(begin)
            text = memory.read(end - begin)
            hidden = text.replace(secret.encode(), b"*" * len(secret.encode()))
            memory.seek(begin)
            memory.write(hidden)
    except (OSError, IndexError, ValueError):
        return
