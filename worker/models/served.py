"""A model that is loaded on this rank: its forward over a batch, and the group that it talks through."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from control.errors import RankError
from worker.collective import Collective
from worker.collective.link import Link
from worker.kv.base import CacheLayout
from worker.kv.slabs import SlabStep
from worker.kv.whole import WholeLayout
from worker.models.batch import Batch, ImageRows
from worker.models.experts import are_in_model
from worker.models.native.forward import native_forward
from worker.models.pooled.pooler import Pooler
from worker.models.vision.rotary import SectionedRotary
from worker.native.library import Threads

if TYPE_CHECKING:
    from worker.models.vision.tower import VisionTower  # it imports transformers

SCORED_AT_ONCE = 64
"""Positions whose logits are held together, of all that a step scores: a large vocabulary makes each of them large."""

Hear = Callable[[Tensor, int], None]
"""(logits (count, vocabulary), index of the first among the batch's scored positions). It must not raise: the other
ranks go on to the next ones."""


class ServedModel:
    """One rank's shard. Public: `vocab_size`, `cache_layout`, `dtype`, `device`, `weight_bytes`."""

    def __init__(
        self,
        module: Any,
        link: Link,
        cache_layout: CacheLayout | WholeLayout,
        vocab_size: int,
        pooler: Pooler | None = None,
        tower: VisionTower | None = None,
    ) -> None:
        """`pooler` makes a vector of what the module gives for a sequence, its hidden states; `tower` is that of a
        model that takes images."""
        self._module, self._link, self._pooler = module, link, pooler
        self.tower, axes = tower, None if tower is None else tower.axes
        outputs = vocab_size if pooler is None else module.config.hidden_size
        self._native = None
        if isinstance(cache_layout, CacheLayout):
            self._native = native_forward(module, link, cache_layout, outputs, axes)
        self.cache_layout, self.vocab_size = cache_layout, vocab_size
        self.dtype, self.device = cache_layout.dtype, cache_layout.device
        self._layers_done = 0
        if self._native is None:
            for layer in getattr(module.base_model, "layers", ()):
                layer.register_forward_hook(self._layer_done)
            if tower is not None and tower.axes is not None:
                module.base_model.rotary_emb = SectionedRotary(module.base_model.rotary_emb, tower.axes)
        # A tied head and embedding are one parameter and counted once; packed weights are no parameters.
        self.weight_bytes = sum(parameter.nbytes for parameter in module.parameters()) + sum(
            getattr(part, "packed_bytes", 0) for part in self.parts()
        )
        self.weight_bytes += 0 if tower is None else tower.bytes

    @property
    def is_native(self) -> bool:
        """True if the forward is C++."""
        return self._native is not None

    @property
    def batch_invariant(self) -> bool:
        """True if a token's logits have the same bits in any batch and chunk, and with any number of threads."""
        return self.is_native and self._link.collective.batch_invariant

    @property
    def threads(self) -> Threads | None:
        """Those of the forward in C++; None where torch runs it: the logits may be on a device."""
        return None if self._native is None else self._native.threads

    def accept(self, accepted: Mapping[int, int]) -> None:
        """Of the last forward's guesses the first ones were right, so many by sequence: recurrent states advance over
        them."""
        if self._native is not None:
            self._native.accept(accepted)

    def parts(self) -> Iterator[nn.Module]:
        return self._module.modules()

    @property
    def progress(self) -> int:
        """A number that changes with each layer of a forward; for any thread. A layer that is launched on a device
        counts as done."""
        encoded = 0 if self.tower is None else self.tower.progress
        return self._layers_done + encoded + (self._native.progress if self._native is not None else 0)

    def _layer_done(self, *_: Any) -> None:
        self._layers_done += 1

    @property
    def collective(self) -> Collective:
        return self._link.collective

    @property
    def waits_for_device(self) -> bool:
        """True if the forward reads values from the device, as the loop over experts asks which of them were hit; or if
        its result is read at once, as vectors are."""
        return self._pooler is not None or are_in_model(self._module.config)

    def join(self, collective: Collective) -> None:
        """Talk through another group from now on, with the weights as they are. Rank and size must be the same."""
        old = self._link.collective
        if (collective.rank, collective.world_size) != (old.rank, old.world_size):
            raise RankError(
                collective.rank,
                "bad_request",
                f"the shard was loaded as rank {old.rank} of {old.world_size}, but the group says rank "
                f"{collective.rank} of {collective.world_size}; load the model again",
            )
        self._link.collective = collective

    @torch.inference_mode()
    def forward(self, batch: Batch, hear: Hear | None = None) -> Tensor:
        """Logits (sampled rows, vocabulary), whole on every rank; float32, or float64 for a float64 model. Stores the
        batch's keys and values, which the caller commits. `hear` gets the logits of the scored positions a few at a
        time. A model with a pooler returns vectors (sampled rows, dimensions)."""
        waits = self.collective.waits
        waits.begin()
        try:
            if self._pooler is not None:
                return self._pooler(batch, self._forward)
            return self._forward(batch, hear)
        finally:
            waits.end()

    def _forward(self, batch: Batch, hear: Hear | None = None) -> Tensor:
        scored = batch.scored
        if self._native is not None and isinstance(batch.cache, SlabStep):
            logits = self._native(batch)
            _tell(hear, scored, self._native.logits_at)
            return logits
        if scored is None:
            return self._logits(batch, batch.sampled)
        body, outputs = self._module.base_model, list[Any]()

        def hear_body(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs.append(output)

        hook = body.register_forward_hook(hear_body)
        try:
            logits = self._logits(batch, batch.sampled)
        finally:
            hook.remove()
        with _answering(body, outputs[0]):
            _tell(hear, scored, partial(self._logits, batch))
        return logits

    def _logits(self, batch: Batch, places: Tensor) -> Tensor:
        more = {} if batch.types is None else {"token_type_ids": batch.types.unsqueeze(0)}
        if batch.ends is not None:
            more["ends"] = batch.ends
        body, given = self._module.base_model, {"input_ids": batch.tokens.unsqueeze(0)}
        if batch.images is not None:
            embedded = self._module.get_input_embeddings()(batch.tokens)
            embedded[batch.images.places] = batch.images.rows.to(embedded.dtype)
            given = {"inputs_embeds": embedded.unsqueeze(0)}
        with _positions(body, batch.axes), _added(body, batch.images):
            logits = self._module(
                **given,
                position_ids=batch.positions.unsqueeze(0),
                logits_to_keep=places,
                use_cache=False,
                cache_step=batch.cache,
                **more,
            ).logits[0]
        return logits if logits.dtype == torch.float64 else logits.float()


@contextmanager
def _positions(body: Any, axes: Tensor | None) -> Generator[None]:
    """Let the rotary embedding of `body` turn by `axes`."""
    if axes is None:
        yield
        return
    body.rotary_emb.positions = axes
    try:
        yield
    finally:
        body.rotary_emb.positions = None


@contextmanager
def _added(body: Any, images: ImageRows | None) -> Generator[None]:
    """Add the rows of images to the outputs of the first layers."""
    hooks: list[Any] = []
    for index, rows in enumerate(images.layers if images is not None else ()):

        def add(_module: nn.Module, _inputs: Any, output: Tensor, rows: Tensor = rows) -> Tensor:
            assert images is not None
            return output.index_add(1, images.places, rows.to(output.dtype).unsqueeze(0))

        hooks.append(body.layers[index].register_forward_hook(add))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tell(hear: Hear | None, scored: Tensor | None, logits_at: Callable[[Tensor], Tensor]) -> None:
    """Give `hear` the logits of the scored positions, piece by piece; on ranks that don't hear them they are computed
    all the same, as others wait for their part."""
    if scored is None:
        return
    for start in range(0, len(scored), SCORED_AT_ONCE):
        piece = logits_at(scored[start : start + SCORED_AT_ONCE])
        if hear is not None:
            hear(piece, start)


@contextmanager
def _answering(body: nn.Module, output: Any) -> Generator[None]:
    """Let the model's body return its last output, so that a call of the model runs its head alone. Heads differ by
    family: some cap or scale their logits."""
    body.forward = lambda *args, **kwargs: output  # type: ignore[method-assign]  # in front of the class's own
    try:
        yield
    finally:
        del body.forward
