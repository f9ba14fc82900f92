"""Scheduling changes no token of an image model: company, preemption and shared beginnings."""

from __future__ import annotations

import pytest
import torch

from control.messages import Sampling
from tests import image_models
from tests.integration.worker.scheduling.test_with_a_model import MAX_TOKENS, generate
from worker.collective import Solo
from worker.models.loading import load
from worker.models.served import ServedModel
from worker.scheduling.sequence import Sequence

PICTURES = {
    "gemma3": [image_models.square(seed) for seed in (1, 2)],
    "qwen3_5": [image_models.picture(seed) for seed in (1, 2)],
}
PIXELS = {one.placed(0).digest: one.data for pictures in PICTURES.values() for one in pictures}


@pytest.fixture(scope="module", params=sorted(PICTURES))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    torch.set_num_threads(1)
    return load(getattr(image_models, kind)(tmp_path_factory.mktemp(kind)), collective=Solo(), dtype="float32")


def requests(kind: str) -> list[Sequence]:
    """One picture; the same with another end; another picture in its place; both."""
    one, other = PICTURES[kind]
    sequences = list[Sequence]()
    for number, (pictures, end) in enumerate((([one], 1), ([one], 2), ([other], 1), ([one, other], 1))):
        prompt, images = image_models.prompt_with(pictures)
        sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.8, seed=str(number))
        sequences.append(Sequence(rid=str(number), choice=0, prompt=[*prompt, end], sampling=sampling, images=images))
    return sequences


@pytest.fixture(scope="module")
def alone(kind: str, model: ServedModel) -> list[list[int]]:
    """The tokens of each request when it runs alone."""
    sequences = requests(kind)
    for sequence in sequences:
        generate(model, [sequence], kv_tokens=400, token_budget=200, pixels=PIXELS)
    assert len({tuple(sequence.output) for sequence in sequences}) == len(sequences)
    return [sequence.output for sequence in sequences]


def test_preemption_changes_nothing(kind: str, model: ServedModel, alone: list[list[int]]) -> None:
    """Requests that together outgrow the KV memory are recomputed: positions and pictures are where they were."""
    sequences = requests(kind)
    state = model.cache_layout.state_tokens if model.cache_layout.state is not None else 0
    preempted = generate(model, sequences, kv_tokens=110 + 2 * state, token_budget=7, pixels=PIXELS)
    assert preempted > 0
    assert [sequence.output for sequence in sequences] == alone


@pytest.mark.parametrize("kind", ["gemma3"], indirect=True)
def test_beginnings_are_shared_where_images_are_equal(kind: str, model: ServedModel, alone: list[list[int]]) -> None:
    """A picture that is equal is not computed again where a copy was kept behind it (its windows are small), one that
    differs is, and what follows it."""
    sequences = requests(kind)
    generate(model, sequences, kv_tokens=1_000, token_budget=64, prefix_tokens=4, every=60, pixels=PIXELS)
    assert [sequence.output for sequence in sequences] == alone
    image = sequences[0].images[0]
    begun = [0, image.start, image.start, image.start + image.count]
    assert [sequence.cached_prompt_tokens for sequence in sequences] == begun
