"""Fixtures of the engine tests: tiny checkpoints and one rank group for all tests of the run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from control.cache import files as cache_files
from tests import models
from tests.integration.worker.engine.ranks import RankGroup


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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
