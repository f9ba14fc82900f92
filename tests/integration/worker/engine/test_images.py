"""Image models give transformers' tokens: those of its processor and whole model, chunk borders inside an image."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from control.commands import GenerateStep, GenerateStepWithImages, StepImage
from control.errors import ModelFilesError, RankError
from control.messages import PromptImage
from tests import image_models, quantized
from tests.integration.worker.engine.parity import engine_of
from tests.integration.worker.engine.ranks import Outcome, RankGroup, play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.engine.test_block_quants import cosine, dequantized
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.repository import multimodal
from worker.repository.files import inspect
from worker.repository.multimodal import FIELD, part_of
from worker.weights.safetensors_header import image_tensors

NEW = 8
CHUNKS = (5, 512)

SIZES = ((30, 21), (17, 40), (60, 12))
PICTURES = [image_models.picture(seed, *size) for seed, size in enumerate(SIZES, 1)]
SQUARES = [image_models.square(seed, *size) for seed, size in enumerate(SIZES, 1)]
OF_KIND = {
    "gemma3": SQUARES,
    "qwen3_5": PICTURES,
    "qwen3_5_moe": PICTURES,
    "qwen3_vl": PICTURES,
    "qwen3_vl_moe": PICTURES,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda kind: getattr(image_models, kind)(tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="module")
def folder(folders: Callable[[str], Path]) -> Path:
    return folders("qwen3_vl")


def with_images(jobs: list[Job], images: dict[int, list[PromptImage]]) -> list[GenerateStep]:
    """The commands of `jobs`; where a sequence with images begins they say so."""
    steps, known = list[GenerateStep](), set[int]()
    for step in write(jobs):
        begun = [row.sid for row in step.change.rows if row.sid not in known and row.sid in images]
        known.update(begun)
        if begun:
            given = [StepImage(sid, *_fields(one)) for sid in begun for one in images[sid]]
            fields = {"epoch": 1, "seq": step.seq, "model_id": "tiny", "change": step.change}
            step = GenerateStepWithImages(**fields, images=given, chunk_size=512)
        steps.append(step)
    return steps


def _fields(image: PromptImage) -> tuple[int, int, int, int, str]:
    return image.start, image.count, image.height, image.width, image.digest


def uncut(kind: str, placed: list[PromptImage]) -> tuple[range, ...]:
    """The positions inside which no row of the kind ends."""
    return tuple(range(one.start, one.start + one.count) for one in placed) if kind == "gemma3" else ()


@pytest.mark.parametrize("kind", sorted(OF_KIND))
def test_images_equal_generate(kind: str, folders: Callable[[str], Path], ranks: RankGroup) -> None:
    """One image and three, in chunks whose borders are inside an image where that may be, among text that joins and
    leaves: greedy float64 tokens of one rank and of two are those of transformers' processor and model."""
    folder, all_pictures = folders(kind), OF_KIND[kind]
    jobs, images, expected = list[Job](), dict[int, list[PromptImage]](), dict[int, list[int]]()
    for pictures in (all_pictures[:1], all_pictures, []):
        prompt, placed = image_models.prompt_with(pictures)
        answer = image_models.generated(folder, prompt, pictures, NEW)
        assert len(set(answer)) > 3
        for chunk in CHUNKS:
            sid = len(jobs) + 1
            jobs.append(Job(sid, prompt, chunk, NEW, start=2 * sid, uncut=uncut(kind, placed)))
            expected[sid] = answer
            if placed:
                images[sid] = placed
    assert len({tuple(one) for one in expected.values()}) == 3
    steps = with_images(jobs, images)
    pixels = {one.placed(0).digest: one.data for one in all_pictures}
    engine = engine_of(folder, "float64")
    assert engine.images is not None
    engine.images.pixels = pixels
    ranks.form(2)
    ranks.ask("load", folder, "float64")
    ranks.ask("know", pixels)
    for outcome in (play(engine, steps), ranks.ask("play", steps)[0]):
        assert outcome.tokens == expected


@pytest.mark.parametrize("kind", sorted(OF_KIND.keys() - {"qwen3_5_moe"}))
def test_the_forward_in_cpp_sees_the_same(kind: str, folders: Callable[[str], Path]) -> None:
    """float32 in C++: the tokens of three images are the same, in chunks and whole, to the bit."""
    folder, pictures = folders(kind), OF_KIND[kind]
    prompt, placed = image_models.prompt_with(pictures)
    pixels = {one.placed(0).digest: one.data for one in pictures}
    jobs = [Job(sid, prompt, chunk, NEW, uncut=uncut(kind, placed)) for sid, chunk in enumerate((5, 512), 1)]
    engine = engine_of(folder, "float32")
    assert engine.model.is_native
    engine.images.pixels = pixels
    outcome = play(engine, with_images(jobs, {1: placed, 2: placed}))
    assert outcome.tokens[1] == image_models.generated(folder, prompt, pictures, NEW)
    for one, other in zip(outcome.logits[1], outcome.logits[2], strict=True):
        assert one.equal(other)


@pytest.mark.parametrize(("kind", "how"), [("gemma3", "awq"), ("qwen3_5", "fp8 by block"), ("qwen3_vl", "gptq")])
def test_a_quantized_text_part_sees_images(kind: str, how: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """A tower that is stored plain beside a quantized text part: the tokens are those of the weights that the format's
    formula gives, in float64."""
    whole_groups = {} if kind == "qwen3_5" else {"intermediate_size": 96}
    source = getattr(image_models, kind)(tmp_path / "source", **whole_groups) if whole_groups else folders(kind)
    stored, plain = quantized.write_with_images(source, tmp_path, how)
    pictures = OF_KIND[kind]
    prompt, placed = image_models.prompt_with(pictures)
    engine = engine_of(stored, "float64")
    pixels = {one.placed(0).digest: one.data for one in pictures}
    engine.images.pixels = pixels
    job = Job(1, prompt, 512, NEW, uncut=uncut(kind, placed))
    expected = image_models.generated(plain, prompt, pictures, NEW)
    assert play(engine, with_images([job], {1: placed})).tokens[1] == expected


def ends_of_texts(kind: str) -> tuple[list[Job], dict[int, list[PromptImage]]]:
    """Beginnings of a prompt with three images, of which the shortest have none, and the images of each."""
    prompt, placed = image_models.prompt_with(OF_KIND[kind])
    marks = {place for one in placed for place in range(one.start - 1, one.start + one.count)}
    jobs, images = list[Job](), dict[int, list[PromptImage]]()
    for sid, end in enumerate([end for end in range(6, len(prompt) + 1) if end - 1 not in marks][::3], 1):
        jobs.append(Job(sid, prompt[:end], 16, 1, start=sid, uncut=uncut(kind, placed)))
        if before := [one for one in placed if one.start < end]:
            images[sid] = before
    assert 0 < len(images) < len(jobs)
    return jobs, images


@pytest.mark.parametrize("quant", ["int8", "q4_0"])
@pytest.mark.parametrize("kind", sorted(OF_KIND))
def test_packed_weights_see_images(kind: str, quant: str, tmp_path: Path, ranks: RankGroup) -> None:
    """Logits behind texts and images, of one rank and of two, have a cosine of 0.999 to those of the weights in
    float32, in blocks to those of the dequantised weights. The control: other pixels give others."""
    tame = {
        "gemma3": {"norm_noise": 0.1},
        "qwen3_5_moe": {"num_experts_per_tok": 8},  # all of them
        "qwen3_vl_moe": {"num_experts_per_tok": 6},
    }.get(kind, {})
    folder = getattr(image_models, kind)(tmp_path / "source", initializer_range=0.05, **tame)
    jobs, images = ends_of_texts(kind)
    steps, pixels = with_images(jobs, images), {one.placed(0).digest: one.data for one in OF_KIND[kind]}
    mirrored = {digest: data[::-1] for digest, data in pixels.items()}

    def logits(outcome: Outcome, sids: Iterable[int]) -> Tensor:
        return torch.stack([outcome.logits[sid][0] for sid in sids])

    def alone(source: Path, quant: str | None, pixels: dict[str, bytes]) -> Outcome:
        model = load(source, collective=Solo(), dtype="auto" if quant else "float32", quant=quant)
        engine = Engine(model, SlabStore(model.cache_layout, 4096), Solo())
        engine.images.pixels = pixels
        return play(engine, steps)

    exact = folder if quant == "int8" else dequantized(folder, quant, tmp_path)
    expected, other = alone(exact, None, pixels), alone(folder, quant, mirrored)
    ranks.form(2)
    ranks.ask("load", folder, "auto", quant)
    ranks.ask("know", pixels)
    texts = [job.sid for job in jobs if job.sid not in images]
    for outcome in (alone(folder, quant, pixels), ranks.ask("play", steps)[0]):
        for sids in (texts, list(images)):
            assert cosine(logits(outcome, sids), logits(expected, sids)) >= 0.999
    assert cosine(logits(other, images), logits(expected, images)) < 0.98


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


def test_a_row_that_ends_inside_a_whole_image_is_refused(folders: Callable[[str], Path]) -> None:
    """Its tokens would see what is not there yet. A row that begins inside, behind a shared beginning, is run to the
    same tokens."""
    engine = engine_of(folders("gemma3"), "float32")
    prompt, placed = image_models.prompt_with(SQUARES[:1])
    engine.images.pixels = {placed[0].digest: SQUARES[0].data}
    inside = placed[0].start + 3
    with pytest.raises(RankError, match=f"a row that ends at {inside}, inside its image at {placed[0].start}"):
        play(engine, with_images([Job(1, prompt, inside, NEW)], {1: placed}))
    engine.clear()
    donor = Job(1, prompt, 512, NEW)
    later = placed[0].start + 14  # what its windows see is there yet
    assert later < placed[0].start + placed[0].count
    heir = Job(2, prompt, 512, NEW, start=2, donor=1, shared=later)
    tokens = play(engine, with_images([donor, heir], {1: placed, 2: placed})).tokens
    assert tokens[2] == tokens[1]


@pytest.mark.parametrize("kind", sorted(OF_KIND))
def test_the_gate_asks_for_the_tensors_of_transformers(kind: str, folders: Callable[[str], Path]) -> None:
    """Names and shapes from config.json are those of the checkpoint; another width is refused, naming the tensor."""
    files = inspect(folders(kind))
    part = part_of(files.config)
    assert part is not None
    expected = multimodal.expected(part, files.config["hidden_size"])
    stored = image_tensors(files.tensors)
    assert {name: one.shape for name, one in stored.items()} == expected
    multimodal.check(files.config, files.tensors)
    other = msgspec.structs.replace(part, vision=part.vision | {"intermediate_size": 40})
    with pytest.raises(ModelFilesError, match=r"fc1.weight has the type F32 and the shape \[48, 32\].* \[40, 32\]"):
        multimodal.check(files.config | {FIELD: msgspec.to_builtins(other)}, files.tensors)
    quantized_too = files.config | {FIELD: msgspec.to_builtins(other), "quantization_config": {"quant_method": "awq"}}
    with pytest.raises(ModelFilesError, match="A tower that is quantized too is not served"):
        multimodal.check(quantized_too, files.tensors)
    with pytest.raises(ModelFilesError, match=f"Token {image_models.IMAGE_PAD} stands for images, but vocab_size"):
        multimodal.check(files.config | {"vocab_size": image_models.IMAGE_PAD}, files.tensors)
