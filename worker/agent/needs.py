"""The needs of models, found beside the agent's loop: a file system may hang for good."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import structlog

from control.errors import FurrowError
from control.messages import ModelSpec
from control.placement.need import ModelNeed
from worker.repository import source, validation
from worker.repository.files import ModelFiles

log = structlog.get_logger()

PATIENCE_S = 5.0
"""Headers are read in less; a model is placed without its need where they can't be."""


def need_of(spec: ModelSpec, files: ModelFiles) -> ModelNeed:
    """Of each rank of a replica as the specification wants it, on CPUs where it names no devices. Raises as a load."""
    from worker.models.need import rank_need  # only here: an agent that plans no memory does without its imports

    ranks = [
        rank_need(
            files,
            tp=spec.tp,
            rank=rank,
            dtype=spec.dtype,
            quant=spec.quant,
            dequantize=spec.dequantize,
            device=spec.devices[rank] if spec.devices else "cpu",
            kv_tokens=spec.kv_tokens,
            max_context=spec.max_context,
        )
        for rank in range(spec.tp)
    ]
    context = validation.context_length(files.config)
    return ModelNeed(revision=spec.revision, context=min(context, spec.max_context or context), ranks=ranks)


class _Search:
    def __init__(self, spec: ModelSpec, place: Path | None) -> None:
        self.spec, self.place = spec, place
        self.need: ModelNeed | None = None
        self.done = False
        self.late_at = time.monotonic() + PATIENCE_S
        threading.Thread(target=self._run, name="need", daemon=True).start()

    def _run(self) -> None:
        try:
            place = self.place or source.on_this_host(self.spec.source, self.spec.gguf)
            if place is not None:
                self.need = need_of(self.spec, validation.inspect(place, self.spec.images))
        except (FurrowError, OSError, ValueError) as error:  # a load says it again
            log.info("need not known", model=self.spec.name, error=str(error), action="find_need")
        except Exception:
            log.exception("need not known", model=self.spec.name, action="find_need")
        finally:
            self.done = True


class NeedFinder:
    """Each model's need at its latest revision, searched for once."""

    def __init__(self) -> None:
        self._searches: dict[tuple[str, bool], _Search] = {}

    def find(self, spec: ModelSpec, place: Path | None = None) -> tuple[bool, ModelNeed | None]:
        """Whether the search is over, and the need; None where it can't be known from files on this host. `place`: the
        files, where that is known by now. Call again until it is over."""
        key = spec.name, place is not None
        search = self._searches.get(key)
        if search is None or search.spec.revision != spec.revision:
            search = self._searches[key] = _Search(spec, place)
        return search.done or time.monotonic() > search.late_at, search.need
