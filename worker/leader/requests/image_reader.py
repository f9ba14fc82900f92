"""The pixels of the images of a step, read before its command is sent: no rank then waits for Redis."""

from __future__ import annotations

from control.commands import StepImage
from control.requests import read_image
from worker.engine.images import EngineImages
from worker.leader.requests.redis_exchange import RedisExchange
from worker.leader.requests.request_manager import RequestManager
from worker.scheduling.scheduler import Scheduler, StepPlan

CHANNELS = 3


class ImageReader:
    """Gives the leader's rank the pixels that it broadcasts. They are kept for one step only."""

    def __init__(
        self,
        model: str,
        exchange: RedisExchange,
        scheduler: Scheduler,
        manager: RequestManager,
        images: EngineImages | None,
    ) -> None:
        self._model, self._exchange, self._scheduler = model, exchange, scheduler
        self._manager, self._images = manager, images
        self._pixels: dict[str, bytes] = {}
        if images is not None:
            images.pixels = lambda image: self._pixels.pop(image.digest, None)

    def fetch(self, plan: StepPlan) -> bool:
        """Read the images that the step encodes; True if there are any. One that is gone is left out. Raises
        EpochOver."""
        self._pixels.clear()
        if self._images is None:
            return False
        needed = [one for one in plan.needed_images() if not self._images.has(one.digest)]
        for one in needed:
            if one.digest not in self._pixels and (pixels := self._read(one)) is not None:
                self._pixels[one.digest] = pixels
        return bool(needed)

    def _read(self, image: StepImage) -> bytes | None:
        rid = self._scheduler.sequence(image.sid).rid
        places = [one.start for one in self._manager.running[rid].params.images]
        calls = read_image(self._model, rid, places.index(image.start), image.height * image.width * CHANNELS)
        pieces: list[bytes] = []
        for call in calls:  # one after the other: each answer is large
            piece = self._exchange.held(call)
            if piece is None:
                return None
            pieces.append(piece)
        return b"".join(pieces)
