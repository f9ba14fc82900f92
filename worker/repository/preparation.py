"""From an assignment to a validated folder, beside the agent's own work.

A file system or a hub may hang for good. So each preparation has a thread that is never joined, and each download a
process that can be killed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from control.backoff import doubling
from control.engines import OWN
from control.errors import FurrowError, HubNeverReached, HubUnreachable, ModelFilesAway
from control.messages import Assignment
from control.quantization import check_quant
from control.records import catalog
from control.redis.clients import SyncRedis
from control.replicas.health import AgentState
from worker.native.host import INSTEAD, check_host
from worker.repository import assets, multimodal, quantized, source, torch_part, validation
from worker.repository.download_progress import Downloaded, Tell
from worker.repository.external import external_model
from worker.repository.gguf import gate
from worker.repository.source import Download

log = structlog.get_logger()

Report = Callable[[str, str, AgentState, str, Assignment, Downloaded | None], None]
"""Reports a replica's state: (model, replica, state, detail, assignment, download)."""

PAUSES_S = doubling(0.5, 8.0)
"""Before each further try, where another one may help; as long as those of ranks that fail to start."""

NEVER_REACHED_S = 5.0
"""For the tries for a model of which the host has no file, where the hub does not answer: the last one ends within
10 s."""


def check(assignment: Assignment, tell: Tell = lambda progress: None, fetch: source.Fetch | None = None) -> Path:
    """Resolve and validate the model's files, before any process is spawned. Returns the folder, or the GGUF file.
    `tell` is called with the progress of a download, which `fetch` does, in this process by default."""
    spec = assignment.spec
    if spec.engine != OWN:
        place = source.resolve(spec.source, tell=tell, fetch=fetch, gguf=spec.gguf)
        external_model(place, spec)
        return place
    check_quant(spec.quant, spec.dtype, assignment.devices)
    if spec.quant is not None:
        check_host(f"--quant {spec.quant}", INSTEAD)
    place = source.resolve(spec.source, tell=tell, fetch=fetch, gguf=spec.gguf)
    files = validation.inspect(place, spec.images)
    validation.check(files.config, spec.tp, spec.max_context, spec.quant)
    quantized.check(files.config, files.tensors, spec.tp, assignment.devices)
    multimodal.check(files.config, files.tensors)
    validation.check_devices(files.config, assignment.devices)
    torch_part.check(torch_part.reason_for(files.config, spec.dtype, assignment.devices))
    assets.check_tokenizer(files)
    if files.gguf is not None:
        gate.check(files.gguf, files.config, spec, assignment.devices)
    return place


class Preparation:
    """One assignment's. `outcome` is None until there is one; after `again` there is none for a while."""

    def __init__(self, assignment: Assignment, done: Callable[[], object]) -> None:
        """`done` is called in a thread of its own when there is an outcome."""
        self.assignment = assignment
        self._done = done
        self.outcome: Path | Exception | None = None
        self.text = f"resolving {assignment.spec.source}"
        """The progress of the preparation, as text."""
        self.downloaded: Downloaded | None = None
        self.reported = ""
        """The text that was reported last."""
        self.attempts = 0
        self._download: Download | None = None
        self._cancelled = False
        self._due = 0.0
        self._began = time.monotonic()
        self._start()

    def again(self, within_s: float = math.inf) -> float | None:
        """Try once more after a pause, whose seconds are returned; None where the tries are used up, or where the next
        one would begin later than `within_s` after the first."""
        if self.attempts > len(PAUSES_S):
            return None
        pause = PAUSES_S[self.attempts - 1]
        if time.monotonic() - self._began + pause > within_s:
            return None
        self.outcome, self._due = None, time.monotonic() + pause
        return pause

    def tend(self) -> None:
        """Begin the next try when it is due. Call in every tick."""
        if self._due and time.monotonic() > self._due:
            self._due = 0.0
            self._start()

    def cancel(self) -> None:
        """End the download, if there is one, and forget the rest. Returns at once."""
        self._cancelled = True
        if self._download is not None:
            self._download.cancel()

    def _start(self) -> None:
        self.attempts += 1
        threading.Thread(target=self._run, name="prepare", daemon=True).start()

    def _run(self) -> None:
        try:
            self.outcome = check(self.assignment, self._tell, self._fetch)
        except Exception as error:
            self.outcome = error
        self._done()

    def _tell(self, progress: Downloaded) -> None:
        self.downloaded, self.text = progress, str(progress)

    def _fetch(self, repository: str, revision: str, cache: Path, tell: Tell, gguf: str | None) -> Path:
        self._download = Download(repository, revision, cache, gguf)
        if self._cancelled:
            self._download.cancel()
        return self._download.run(tell)


class Preparations:
    """All of one agent's, by model and replica."""

    def __init__(self, client: SyncRedis, report: Report, done: Callable[[], object] = lambda: None) -> None:
        """`done` is called in another thread when one has an outcome: its `turn` is due."""
        self._client = client
        self._report = report
        self._done = done
        self._by_place: dict[tuple[str, str], Preparation] = {}

    @property
    def under_way(self) -> bool:
        return bool(self._by_place)

    def turn(self, place: tuple[str, str], assignment: Assignment) -> Path | str | None:
        """The folder, or why there is none; None while it is awaited. Call in every tick."""
        preparation = self._by_place.get(place)
        if preparation is not None and preparation.assignment.spec.revision != assignment.spec.revision:
            self.leave(place)  # the model is wanted otherwise by now
            preparation = None
        if preparation is None:
            preparation = self._by_place[place] = Preparation(assignment, self._done)
        preparation.tend()
        outcome = preparation.outcome
        if outcome is None:
            if preparation.text != preparation.reported:
                self._report(*place, "starting", preparation.text, assignment, preparation.downloaded)
                preparation.reported = preparation.text
        elif not isinstance(outcome, Exception):
            del self._by_place[place]
        elif self._again(preparation, outcome):
            return None
        else:
            del self._by_place[place]
            expected = isinstance(outcome, FurrowError)
            log.error(
                "assignment refused",
                model=place[0],
                error=str(outcome),
                exc_info=None if expected else outcome,
                action="prepare_model",
            )
            tries = f" Tried {preparation.attempts} times." if preparation.attempts > 1 else ""
            return (str(outcome) if expected else repr(outcome)) + tries
        return outcome

    def leave(self, place: tuple[str, str]) -> None:
        """The model is not wanted here any more: a download ends."""
        if (preparation := self._by_place.pop(place, None)) is not None:
            preparation.cancel()

    def close(self) -> None:
        for preparation in self._by_place.values():
            preparation.cancel()

    def _again(self, preparation: Preparation, error: Exception) -> bool:
        """Plan another try after an error of the hub, or for a model that was loaded once; False if there is none. A
        source that was never loaded is more often a wrong name than one that is away."""
        model = preparation.assignment.spec.name
        if not isinstance(error, ModelFilesAway):
            return False
        loaded = catalog.get_assets(self._client, model) is not None
        if not isinstance(error, HubUnreachable) and not loaded:
            return False
        never = isinstance(error, HubNeverReached) and not loaded
        pause = preparation.again(NEVER_REACHED_S) if never else preparation.again()
        if pause is None:
            return False
        log.warning("model files unavailable", model=model, error=str(error), next_try_s=pause, action="prepare_model")
        detail = f"{error} The next try is in {pause:g} s."
        self._report(model, preparation.assignment.replica, "backoff", detail, preparation.assignment, None)
        return True
