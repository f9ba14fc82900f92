"""Fixtures of the engine tests: tiny checkpoints and one rank group for all tests of the run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from control import cache as cache_files
from tests import models
from tests.integration.worker.engine.ranks import RankGroup
from worker.models import loading
from worker.models.torch import layers
from worker.native.library import Threads, threads_here
from worker.selftest.shapes import Shapes


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def narrow(missing: type[Exception]) -> Callable[[Iterable[str] | None, Shapes], Threads | None]:
    """threads_here, whose Threads raise `missing` for a kind of weights that was not asked for: the library of the
    tests has all."""

    def threads(kinds: Iterable[str] | None, _shapes: Shapes) -> Threads | None:
        found, known = threads_here(), None if kinds is None else {"float32", *kinds}
        if found is not None and known is not None:
            number = found.number

            def checked(kind: str) -> int:
                if kind not in known:
                    raise missing(f"{kind} is not among {sorted(known)}")
                return number(kind)

            found.number = checked
        return found

    return threads


@pytest.fixture(scope="session", autouse=True)
def kinds_are_foreseen() -> Iterator[None]:
    """Every load of these tests names all kinds of weights before it meets them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (loading, layers):
            patch.setattr(module, "threads_here", narrow(AssertionError))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's tiny checkpoint, made once."""
    return functools.cache(lambda family: models.make(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    """Four processes; a test forms groups of 2 or 4 of them."""
    group = RankGroup(4, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights of an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_files.folder("weights")
