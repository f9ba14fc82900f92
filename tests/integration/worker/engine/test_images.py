"""Images against transformers: the tokens are those of its processor and whole model, chunk borders inside an image."""

from __future__ import annotations

from pathlib import Path

import pytest

from control.commands import GenerateStep, GenerateStepWithImages, StepImage
from control.messages import PromptImage
from tests import image_models
from tests.integration.worker.engine.parity import engine_of
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import Job, write

NEW = 8
CHUNKS = (5, 512)

PICTURES = [image_models.picture(1), image_models.picture(2, 17, 40), image_models.picture(3, 60, 12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_models.qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"))


def with_images(jobs: list[Job], images: dict[int, list[PromptImage]]) -> list[GenerateStep]:
    """The commands of `jobs`; where a sequence with images begins they say so."""
    steps = list[GenerateStep]()
    for step in write(jobs):
        begun = [row.sid for row in step.change.rows if row.offset == 0 and row.sid in images]
        if begun:
            given = [StepImage(sid, *_fields(one)) for sid in begun for one in images[sid]]
            fields = {"epoch": 1, "seq": step.seq, "model_id": "tiny", "change": step.change}
            step = GenerateStepWithImages(**fields, images=given, chunk_size=512)
        steps.append(step)
    return steps


def _fields(image: PromptImage) -> tuple[int, int, int, int, str]:
    return image.start, image.count, image.height, image.width, image.digest


def test_images_equal_generate(folder: Path, ranks: RankGroup) -> None:
    """One image and three, in chunks whose borders are inside an image, among text that joins and leaves: greedy
    float64 tokens of one rank and of two are those of transformers' processor and model."""
    jobs, images, expected = list[Job](), dict[int, list[PromptImage]](), dict[int, list[int]]()
    for pictures in (PICTURES[:1], PICTURES, []):
        prompt, placed = image_models.prompt_with(pictures)
        answer = image_models.generated(folder, prompt, pictures, NEW)
        assert len(set(answer)) > 3
        for chunk in CHUNKS:
            sid = len(jobs) + 1
            jobs.append(Job(sid, prompt, chunk, NEW, start=2 * sid))
            expected[sid] = answer
            if placed:
                images[sid] = placed
    assert len({tuple(one) for one in expected.values()}) == 3
    steps = with_images(jobs, images)
    pixels = {one.placed(0).digest: one.data for one in PICTURES}
    engine = engine_of(folder, "float64")
    assert engine.images is not None
    engine.images.pixels = lambda image: pixels[image.digest]
    ranks.form(2)
    ranks.ask("load", folder, "float64")
    ranks.ask("know", pixels)
    for outcome in (play(engine, steps), ranks.ask("play", steps)[0]):
        assert outcome.tokens == expected


def test_the_forward_in_cpp_sees_the_same(folder: Path) -> None:
    """float32 in C++: the tokens of one image and three are the same, in chunks and whole, to the bit."""
    prompt, placed = image_models.prompt_with(PICTURES)
    pixels = {one.placed(0).digest: one.data for one in PICTURES}
    jobs = [Job(sid, prompt, chunk, NEW) for sid, chunk in enumerate((5, 512), 1)]
    engine = engine_of(folder, "float32")
    assert engine.model.is_native
    engine.images.pixels = lambda image: pixels[image.digest]
    outcome = play(engine, with_images(jobs, {1: placed, 2: placed}))
    assert outcome.tokens[1] == image_models.generated(folder, prompt, PICTURES, NEW)
    for one, other in zip(outcome.logits[1], outcome.logits[2], strict=True):
        assert one.equal(other)


def test_pixels_that_are_gone_fail_their_request_alone(folder: Path) -> None:
    """The row of the sequence is named; the text beside it has its tokens."""
    prompt, placed = image_models.prompt_with(PICTURES[:1])
    engine = engine_of(folder, "float32")
    text = list(range(20))
    alone = play(engine_of(folder, "float32"), write([Job(2, text, 512, NEW)])).tokens[2]
    steps = with_images([Job(1, prompt, 512, NEW), Job(2, text, 512, NEW)], {1: placed})
    with engine.step(steps[0]) as step:
        assert set(step.forward().scores.failed) == {1}
        step.agree([0, alone[0]])
