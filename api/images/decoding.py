"""The decoder process as the API uses it: started when it is needed, killed when it is late."""

from __future__ import annotations

import asyncio
import json
import signal
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from api.asgi.turns import Turns
from control.errors import FurrowError
from control.messages import ImageInput

log = structlog.stdlib.get_logger(__name__)

MEMORY_BYTES = 1024 * 1024 * 1024
"""Address space of the decoder: an image of the most pixels with transparency, a copy of it, and Python."""
PROCESSOR_S = 5.0
"""For one image: what the decoder computes for it."""
DEADLINE_S = 10.0
"""For one image, by the clock: the decoder may have to share its processor."""

_ROOT = Path(__file__).parents[2]


class NotDecoded(FurrowError):
    """An image that is not taken; the text follows the image's name in a sentence. `too_large`: it is only too large
    beside the others of its request."""

    def __init__(self, why: str, *, too_large: bool = False) -> None:
        super().__init__(why)
        self.too_large = too_large


@dataclass(frozen=True, slots=True)
class Decoded:
    """An image as the model takes it: rows of red, green and blue."""

    height: int
    width: int
    digest: str
    pixels: bytes


class Decoder:
    """One process, which decodes one image at a time, of the tenant that has used it least. The time of an image that
    is given up counts too."""

    def __init__(
        self, memory_bytes: int = MEMORY_BYTES, deadline_s: float = DEADLINE_S, processor_s: float = PROCESSOR_S
    ) -> None:
        self._memory_bytes = memory_bytes
        self._deadline_s = deadline_s
        self._processor_s = processor_s
        self._process: asyncio.subprocess.Process | None = None
        self._turns = Turns()

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return None if self._process is None else self._process.pid

    async def decode(self, data: bytes, wanted: ImageInput, room: int, tenant: str = "") -> Decoded:
        """The image in at most `room` bytes of pixels. Raises NotDecoded."""
        job = {
            "bytes": len(data),
            "room": room,
            "unit": wanted.unit,
            "side": wanted.side,
            "least_pixels": wanted.least_pixels,
            "most_pixels": wanted.most_pixels,
            "resample": wanted.resample,
        }
        async with self._turns.turn(tenant):
            done = False
            try:
                async with asyncio.timeout(self._deadline_s):
                    told, pixels = await self._exchange(json.dumps(job).encode(), data)
                done = True
            except TimeoutError:
                raise NotDecoded(f"took more than {self._deadline_s:g} s to decode; send a simpler one") from None
            except (asyncio.IncompleteReadError, OSError) as error:
                if await self._kill() == -signal.SIGPROF:
                    raise NotDecoded(
                        f"took more than {self._processor_s:g} s of processor time to decode; send a simpler one"
                    ) from None
                log.warning("the image decoder ended", error=repr(error), action="decode_image")
                raise NotDecoded("ended the process that decodes images; send another one") from error
            finally:
                if not done:  # whatever it would still answer belongs to nobody
                    await self._kill()
        if "error" in told:
            raise NotDecoded(told["error"], too_large=told.get("too_large", False))
        return Decoded(told["height"], told["width"], told["digest"], pixels)

    async def stop(self) -> None:
        await self._kill()

    async def _exchange(self, head: bytes, data: bytes) -> tuple[dict[str, Any], bytes]:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "api.images.decoder", str(self._memory_bytes), str(self._processor_s)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=_ROOT,
                env={},
            )
        to, back = self._process.stdin, self._process.stdout
        assert to is not None and back is not None
        to.write(struct.pack(">I", len(head)) + head)
        to.write(data)
        await to.drain()
        (length,) = struct.unpack(">I", await back.readexactly(4))
        told = json.loads(await back.readexactly(length))
        return told, await back.readexactly(told["bytes"])

    async def _kill(self) -> int | None:
        """End the process. Returns its status, negative for the signal that ended it; None where there is none."""
        process, self._process = self._process, None
        if process is None:
            return None
        with suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
