"""The decoder process as the API uses it: one image at a time, of the tenant that has used it least."""

from __future__ import annotations

import signal

import msgspec
import structlog

from api.http.turns import Turns
from api.images.jobs import Answer, Decoded, Job, Refusal
from api.images.limits import MOST_PIXEL_BYTES
from control.confinement import ConfinedFailure, ConfinedProcess, Ended, TooSlow
from control.errors import FurrowError
from control.messages import ImageInput

log = structlog.stdlib.get_logger(__name__)

MEMORY_BYTES = 1024 * 1024 * 1024
"""Address space of the decoder: an image of the most pixels with transparency, a copy of it, and Python."""
PROCESSOR_S = 5.0
"""For one image: what the decoder computes for it."""
DEADLINE_S = 10.0
"""For one image, by the clock: the decoder may have to share its processor."""
_ANSWER_BYTES = MOST_PIXEL_BYTES + 4096

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Answer).decode


class NotDecoded(FurrowError):
    """An image that was refused; the text follows the image's name in a sentence. `too_large`: it is only too large
    beside the others of its request."""

    def __init__(self, why: str, *, too_large: bool = False) -> None:
        super().__init__(why)
        self.too_large = too_large


class Decoder:
    """Decodes images in that process. The time of an image that is given up counts for its tenant too."""

    def __init__(
        self, memory_bytes: int = MEMORY_BYTES, deadline_s: float = DEADLINE_S, processor_s: float = PROCESSOR_S
    ) -> None:
        self._deadline_s = deadline_s
        self._processor_s = processor_s
        self._child = ConfinedProcess(
            "api.images.decoder",
            str(memory_bytes),
            str(processor_s),
            deadline_s=deadline_s,
            most_answer_bytes=_ANSWER_BYTES,
        )
        self._turns = Turns()

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return self._child.pid

    async def decode(self, data: bytes, image_input: ImageInput, room: int, tenant: str = "") -> Decoded:
        """The image in at most `room` bytes of pixels. Raises NotDecoded."""
        async with self._turns.turn(tenant):
            answer = await self._child.run(self._ask, Job(data, image_input, room))
        if isinstance(answer, Refusal):
            raise NotDecoded(answer.why, too_large=answer.too_large)
        return answer

    def stop(self) -> None:
        self._child.close()

    def _ask(self, job: Job) -> Answer:
        try:
            return _decode(self._child.ask(_encode(job)))
        except TooSlow:
            limit = f"{self._deadline_s:g} s to decode"
        except ConfinedFailure as error:
            if not isinstance(error, Ended) or error.status != -signal.SIGPROF:
                log.warning("the image decoder ended", error=repr(error), action="decode_image")
                raise NotDecoded("ended the process that decodes images; send another one") from error
            limit = f"{self._processor_s:g} s of processor time to decode"
        raise NotDecoded(f"took more than {limit}; send a simpler one")
