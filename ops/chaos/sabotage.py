"""Farms with one safety mechanism switched off, in which the checker must find broken streams.

The product's code has no switch for it: a `sitecustomize` on the path of the farm's processes changes the text of the
scripts, or one function, when its module is imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PRELUDE = '''"""Written by a chaos run: one safety mechanism of this farm is switched off."""
import hashlib, importlib.abc, importlib.machinery, sys


def rewrite_scripts(module, *pairs):
    """Replace text in every script that has it; a pair that is found nowhere is an error."""
    for old, new in pairs:
        assert any(old in script.text for script in module.SCRIPTS.values()), old
        for name, script in list(module.SCRIPTS.items()):
            text = script.text.replace(old, new)
            module.SCRIPTS[name] = module.Script(text, hashlib.sha1(text.encode()).hexdigest())


class Saboteur(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module, and then changes it."""

    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        self.loader, found.loader = found.loader, self
        return found

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        sabotage(module)


sys.meta_path.insert(0, Saboteur())
'''


@dataclass(frozen=True)
class Sabotage:
    """`module` is changed by `code`, the body of a function of it; `kinds` are the faults that then must do harm."""

    what: str
    module: str
    code: str
    kinds: tuple[str, ...]

    def write(self, folder: Path) -> dict[str, str]:
        """Write it into `folder`; returns the environment of the processes to change."""
        body = "".join(f"    {line}\n" for line in self.code.strip().splitlines())
        head = f"MODULE = {self.module!r}\n\n\ndef sabotage(module):\n{body}\n\n"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(_PRELUDE.replace("\n\nclass", f"\n\n{head}class", 1))
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return {"PYTHONPATH": path}


FRAIL = Sabotage(
    "a leader that feeds a prompt of one token, again and again, dies of a segmentation fault",
    "worker.engine.step",
    """
forward = module.Step.forward

def frail(step, *how):
    rows = step.command.change.rows
    if step.rank == 0 and any(len(row.tokens) >= 8 and set(row.tokens) == {11} for row in rows):
        import os, signal
        os.kill(os.getpid(), signal.SIGSEGV)
    return forward(step, *how)

module.Step.forward = frail
""",
    ("crash-two-replicas",),
)
"""Not a control: it harms only the crashing request of these kinds."""

CONTROLS = {
    "no-seq-check": Sabotage(
        "emit appends and numbers whatever it is given, so that a repeat after a lost answer is in the log twice",
        "control.scripts",
        """
rewrite_scripts(
    module,
    ("elseif f[3] + 1 ~= seq or f[2] ~= 'running' then", "elseif false then"),
    (
        "local last = seq - 1\\n",
        "local last = tonumber(f[3])\\n"
        "for i = 1, count do\\n"
        "  entries[i] = string.gsub(entries[i], '^%[%d+', '[' .. whole(last + i))\\n"
        "end\\n",
    ),
)
""",
        ("drop-replies",),
    ),
    "no-replay": Sabotage(
        "a new epoch continues each request from its prompt alone, as if nothing had been produced",
        "worker.leader.requests.running",
        """
replay = module.RunningRequest.replay

def forgetful(request, entries):
    replay(request, entries)
    for sequence in request.live:
        sequence.output.clear()

module.RunningRequest.replay = forgetful
""",
        ("leader-kill", "rank-kill"),
    ),
}
