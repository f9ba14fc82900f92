"""A model whose forward is torch's."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from worker.collective.base import Link
from worker.kv.base import CacheLayout, WholeLayout
from worker.models.served import Batch, Hear, ImageRows, ServedModel, tell
from worker.models.torch.layers import NativeLinear
from worker.models.torch.vision import SectionedRotary
from worker.tensors import as_tensor

if TYPE_CHECKING:
    from worker.models.torch.pooled import Pooler  # it imports this module
    from worker.models.torch.vision import VisionTower  # it imports transformers


class TorchModel(ServedModel):
    """A model of transformers, or an encoder."""

    def __init__(
        self,
        module: Any,
        link: Link,
        cache_layout: CacheLayout | WholeLayout,
        vocab_size: int,
        pooler: Pooler | None = None,
        tower: VisionTower | None = None,
    ) -> None:
        super().__init__(module.config, link, cache_layout, vocab_size, pooler, tower)
        self._module = module
        self._layers_done = 0
        for layer in getattr(body_of(module), "layers", ()):
            layer.register_forward_hook(self._layer_done)
        if tower is not None and tower.axes is not None:
            body = body_of(module)
            body.rotary_emb = SectionedRotary(body.rotary_emb, tower.axes)
        # A tied head and embedding are one parameter and counted once; packed weights are no parameters.
        self.weight_bytes = sum(parameter.nbytes for parameter in module.parameters()) + sum(
            getattr(part, "packed_bytes", 0) for part in self.parts()
        )
        self.weight_bytes += 0 if tower is None else tower.bytes

    @property
    def kernels(self) -> str | None:
        return next((part.threads.kernels for part in self.parts() if isinstance(part, NativeLinear)), None)

    @property
    def no_logits(self) -> Tensor:
        return torch.empty(0, self.vocab_size, device=self.device)

    def parts(self) -> Iterator[nn.Module]:
        return self._module.modules()

    @property
    def progress(self) -> int:
        return super().progress + self._layers_done

    def _layer_done(self, *_: Any) -> None:
        self._layers_done += 1

    @torch.inference_mode()
    def forward(self, batch: Batch, hear: Hear | None = None) -> Tensor:
        return super().forward(batch, hear)

    def _forward(self, batch: Batch, hear: Hear | None = None) -> Tensor:
        batch = on_device(batch, self.device)
        scored = batch.scored
        if scored is None:
            return self._logits(batch, batch.sampled)
        body = body_of(self._module)
        outputs = list[Any]()

        def hear_body(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs.append(output)

        hook = body.register_forward_hook(hear_body)
        try:
            logits = self._logits(batch, batch.sampled)
        finally:
            hook.remove()
        with _answering(body, outputs[0]):
            tell(hear, scored, partial(self._logits, batch))
        return logits

    def _logits(self, batch: Batch, places: Tensor) -> Tensor:
        more = {} if batch.types is None else {"token_type_ids": batch.types.unsqueeze(0)}
        if batch.ends is not None:
            more["ends"] = batch.ends
        body = body_of(self._module)
        inputs = {"input_ids": batch.tokens.unsqueeze(0)}
        if batch.images is not None:
            embedded = self._module.get_input_embeddings()(batch.tokens)
            embedded[batch.images.places] = batch.images.rows.to(embedded.dtype)
            inputs = {"inputs_embeds": embedded.unsqueeze(0)}
        with _positions(body, batch.axes), _added(body, batch.images):
            logits = self._module(
                **inputs,
                position_ids=batch.positions.unsqueeze(0),
                logits_to_keep=places,
                use_cache=False,
                cache_step=batch.cache.attention,
                **more,
            ).logits[0]
        return logits if logits.dtype == torch.float64 else logits.float()


def body_of(module: Any) -> Any:
    """The part of a model of transformers without its head. Some classes name another one as theirs."""
    return module.base_model if module.base_model is not module else getattr(module, "model", module)


@torch.inference_mode(False)
def on_device(batch: Batch, device: str) -> Batch:
    """The batch with its arrays as tensors on `device`, that are none of inference mode. A tensor of it stays as it
    is."""

    def sent(numbers: Any) -> Tensor | None:
        if numbers is None or isinstance(numbers, Tensor):
            return numbers
        # A tensor that is made on a device waits for what runs there.
        return as_tensor(numbers).to(device, non_blocking=True)

    images = batch.images
    if images is not None:
        images = ImageRows(sent(images.places), sent(images.rows), sent(images.layers))
    names = ("tokens", "positions", "sampled", "scored", "types", "axes", "ends")
    return replace(batch, images=images, **{name: sent(getattr(batch, name)) for name in names})


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


@contextmanager
def _answering(body: nn.Module, output: Any) -> Generator[None]:
    """Let the model's body return its last output, so that a call of the model runs its head alone. Heads differ by
    family: some cap or scale their logits."""
    body.forward = lambda *args, **kwargs: output  # type: ignore[method-assign]  # in front of the class's own
    try:
        yield
    finally:
        del body.forward
