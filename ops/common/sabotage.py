"""Processes with one mechanism switched off, in which a check must fail: the check of the check.

The product's code has no switch for it: a `sitecustomize` on the path of the processes changes the text of the scripts,
or functions, when a module is imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PRELUDE = '''"""Written by a check of Furrow: one mechanism of these processes is switched off."""
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
    """`module` is changed by `code`, the body of a function of it; `kinds` are the checks that then must fail."""

    behaviour: str
    """The wrong behaviour of the changed processes, as the end of "although ..."."""
    module: str
    code: str
    kinds: tuple[str, ...]

    def write(self, folder: Path) -> dict[str, str]:
        """Write it into `folder`; returns the environment of the processes to change."""
        body = "".join(f"    {line}\n" for line in self.code.strip().splitlines())
        head = f"MODULE = {self.module!r}\n\n\ndef sabotage(module):\n{body}\n\n"
        return run_at_start(folder, _PRELUDE.replace("\n\nclass", f"\n\n{head}class", 1))


def run_at_start(folder: Path, code: str) -> dict[str, str]:
    """Write code into `folder` that Python processes run when they start; returns what their environment needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path}
