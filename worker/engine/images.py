"""Images of the sequences on this rank: their places, the rows that stand for them, and the positions around them.

All ranks do the same: it follows from the commands alone. Rank 0 has the pixels, and broadcasts those of an image that
is not encoded here when a row first holds a part of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from control.commands import StepImage, StepRow
from control.messages import PromptImage
from worker.collective import Collective
from worker.models.served import AXES, ImageRows, Row

if TYPE_CHECKING:  # they import torch
    from worker.models.torch.vision import Features, VisionTower

Integers = NDArray[np.int64]

KEPT_TOKENS = 32_768
"""Tokens of encoded images that are kept for the next chunks of their prompts."""

LOST = "An image of the request is gone: Redis has lost it. Send the request again."


@dataclass(frozen=True)
class _PositionRun:
    """Positions [start, stop) of a sequence in a row: text, or with `columns` an image of so many tokens a row. The
    first token has the position `first`."""

    start: int
    stop: int
    first: int
    columns: int = 0


class SequenceImages:
    """The images of one sequence."""

    def __init__(self, images: Sequence[StepImage], grid: Callable[[int, int], tuple[int, int]]) -> None:
        self.images = list(images)
        self._segments: list[_PositionRun] = []
        index = position = 0
        for image in self.images:
            rows, columns = grid(image.height, image.width)
            self._segments.append(_PositionRun(index, image.start, position))
            position += image.start - index
            index = image.start + image.count
            self._segments.append(_PositionRun(image.start, index, position, columns))
            position += max(rows, columns)
        self._segments.append(_PositionRun(index, 1 << 62, position))

    def axes(self, start: int, stop: int) -> Integers:
        """Positions in time, height and width of the tokens [start, stop): (3, stop - start) int64."""
        parts: list[Integers] = []
        for segment in self._segments:
            begin = max(start, segment.start)
            end = min(stop, segment.stop)
            if begin >= end:
                continue
            within = np.arange(begin - segment.start, end - segment.start)
            if not segment.columns:
                parts.append(_text_axes(segment.first + within))
            else:
                place = np.stack([np.zeros_like(within), within // segment.columns, within % segment.columns])
                parts.append(segment.first + place)
        return np.concatenate(parts, axis=1)


class EngineImages:
    """The images of an engine whose model takes images."""

    def __init__(self, tower: VisionTower) -> None:
        self._tower = tower
        self._sequences: dict[int, SequenceImages] = {}
        self._encoded: OrderedDict[str, Features] = OrderedDict()
        self.pixels: dict[str, bytes] = {}
        """On rank 0, by digest: the pixels of the images that the next step encodes, rows of red, green and blue. An
        image without pixels is gone."""
        self.failures: dict[int, str] = {}
        """Sequences whose pixels were gone in the last forward, and why what it computed for them is worth nothing."""

    @property
    def whole(self) -> bool:
        """True if a row has all of an image's tokens from its first one on, or none."""
        return self._tower.whole

    @property
    def token(self) -> int:
        """The placeholder."""
        return self._tower.input.token

    def unfit(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> str | None:
        """The reason why a prompt with these images can't be run; None if it can."""
        if why := unfit(images, self._tower.grid):
            return why
        places = [place for image in images for place in range(image.start, image.start + image.count)]
        if places != [place for place, token in enumerate(prompt) if token == self.token]:
            return f"its prompt has {prompt.count(self.token)} placeholders for {len(places)} parts of images"
        return None

    def has(self, digest: str) -> bool:
        """True if the image is encoded here."""
        return digest in self._encoded

    def fault(self, images: Iterable[StepImage], rows: Sequence[StepRow], most: int | None) -> str | None:
        """The reason why a command can't be run, None if it can: placeholders that are no image's, or the other way
        round, or rows above `most` tokens or that end inside an image which has to be whole."""
        by_sid = _by_sid(images)
        for sid, new in by_sid.items():
            if why := unfit(new, self._tower.grid):
                return f"sequence {sid}: {why}"
        for row in rows:
            images_of_row = by_sid.get(row.sid) or getattr(self._sequences.get(row.sid), "images", [])
            if most is not None and len(row.tokens) > most:
                return f"sequence {row.sid} has a row of {len(row.tokens)} tokens, and chunks have {most}"
            for image in images_of_row:
                begin = max(image.start, row.offset)
                end = min(image.start + image.count, row.offset + len(row.tokens))
                part = row.tokens[begin - row.offset : max(begin, end) - row.offset]
                if any(token != self.token for token in part):
                    return f"sequence {row.sid} has no placeholders where its image begins at {image.start}"
                if self.whole and begin < end < image.start + image.count:
                    return f"sequence {row.sid} has a row that ends at {end}, inside its image at {image.start}"
        return None

    def add(self, images: Iterable[StepImage]) -> None:
        self._sequences |= {sid: SequenceImages(new, self._tower.grid) for sid, new in _by_sid(images).items()}

    def drop(self, sids: Iterable[int]) -> None:
        for sid in sids:
            self._sequences.pop(sid, None)

    def clear(self) -> None:
        self._sequences.clear()
        self._encoded.clear()

    def axes(self, rows: Sequence[Row]) -> Integers | None:
        """The positions of a batch; None where none of its sequences has images, or a token has one position."""
        if self._tower.axes is None or not any(row.sid in self._sequences for row in rows):
            return None
        parts: list[Integers] = []
        for row in rows:
            start = row.offset
            stop = row.offset + len(row.tokens)
            sequence = self._sequences.get(row.sid)
            parts.append(_text_axes(np.arange(start, stop)) if sequence is None else sequence.axes(start, stop))
        return np.concatenate(parts, axis=1)

    def ends(self, rows: Sequence[Row]) -> Integers | None:
        """The positions before which the tokens of a batch see their sequences: those of an image see all of it. None
        where each sees what is before it and itself."""
        if not self.whole:
            return None
        parts: list[Integers] = []
        sees_ahead = False
        for row in rows:
            ends = np.arange(row.offset + 1, row.offset + len(row.tokens) + 1)
            for _, begin, end in self._parts(row):
                ends[begin - row.offset : end - row.offset] = end
                sees_ahead = True
            parts.append(ends)
        return np.concatenate(parts) if sees_ahead else None

    def rows(self, rows: Sequence[Row], collective: Collective) -> ImageRows | None:
        """The features in place of a batch's placeholders; None where it holds none."""
        self.failures.clear()
        places: list[Integers] = []
        embedded: list[NDArray[Any]] = []
        layers: list[NDArray[Any]] = []
        first = 0
        for row in rows:
            for image, begin, end in self._parts(row):
                features = self._features(image, collective)
                if features is None:
                    self.failures[row.sid] = LOST
                    continue
                places.append(np.arange(begin, end) + first - row.offset)
                part = slice(begin - image.start, end - image.start)
                embedded.append(features.rows[part])
                layers.append(features.layers[:, part])
            first += len(row.tokens)
        self._forget(rows)
        if not places:
            return None
        return ImageRows(np.concatenate(places), np.concatenate(embedded), np.concatenate(layers, axis=1))

    def _parts(self, row: Row) -> Iterator[tuple[StepImage, int, int]]:
        """The images of which a row has a part, with the positions at which the part begins and ends."""
        sequence = self._sequences.get(row.sid)
        for image in sequence.images if sequence is not None else ():
            begin = max(image.start, row.offset)
            end = min(image.start + image.count, row.offset + len(row.tokens))
            if begin < end:
                yield image, begin, end

    def _features(self, image: StepImage, collective: Collective) -> Features | None:
        encoded = self._encoded.get(image.digest)
        if encoded is not None:
            self._encoded.move_to_end(image.digest)
            return encoded
        pixels = self._shared(image, collective)
        if pixels is None:
            return None
        features = self._encoded[image.digest] = self._tower.encode(pixels)
        return features

    def _shared(self, image: StepImage, collective: Collective) -> NDArray[np.uint8] | None:
        """The pixels (height, width, 3) uint8 on every rank."""
        size = image.height * image.width * 3
        data = self.pixels.get(image.digest) if collective.rank == 0 else None
        if data is not None and len(data) != size:
            data = None
        is_read = collective.broadcast(np.array([data is not None], np.int64))
        if not is_read[0]:
            return None
        # Collectives carry numbers of eight bytes.
        room = np.zeros(-(-size // 8), np.int64)
        if data is not None:
            room.view(np.uint8)[:size] = np.frombuffer(data, np.uint8)
        collective.broadcast(room)
        return room.view(np.uint8)[:size].reshape(image.height, image.width, 3)

    def _forget(self, rows: Sequence[Row]) -> None:
        """Forget encoded images that have been fed to the end, and those used longest ago beyond the room."""
        fed = {row.sid: row.offset + len(row.tokens) for row in rows}
        ended = {
            image.digest
            for sid, stop in fed.items()
            if sid in self._sequences
            for image in self._sequences[sid].images
            if image.start + image.count <= stop
        }
        for digest in ended:
            self._encoded.pop(digest, None)
        while sum(len(encoding.rows) for encoding in self._encoded.values()) > KEPT_TOKENS:
            self._encoded.popitem(last=False)


def _text_axes(positions: Integers) -> Integers:
    """Text has the same position on each axis: (3, positions)."""
    return np.repeat(positions[None], AXES, axis=0)


def unfit(images: Sequence[StepImage | PromptImage], grid: Callable[[int, int], tuple[int, int]]) -> str | None:
    """The reason why these can't be the images of one sequence; None if they can."""
    end = 0
    for image in images:
        rows, columns = grid(image.height, image.width)
        if rows * columns != image.count or not image.count:
            return f"an image of {image.height} × {image.width} pixels has {rows * columns} tokens, not {image.count}"
        if image.start < end:
            return f"the image at {image.start} begins before position {end}, where the one before it ends"
        end = image.start + image.count
    return None


def _by_sid(images: Iterable[StepImage]) -> dict[int, list[StepImage]]:
    by_sid: dict[int, list[StepImage]] = {}
    for image in images:
        by_sid.setdefault(image.sid, []).append(image)
    return by_sid
