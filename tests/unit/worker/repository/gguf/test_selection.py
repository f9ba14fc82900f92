"""Which GGUF file is the model: of a folder or repository."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError

from control.errors import ModelFilesAway, ModelFilesError
from tests import gguf_models
from tests.gguf_models import Stored, vocabulary, write
from worker.repository import source
from worker.repository.gguf.description import describe
from worker.repository.gguf.selection import choose
from worker.weights.gguf import read_model

NAMES = [
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m.q8_0.gguf",
    "mmproj-m-F16.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
    "m-UD-Q6_K.gguf",
    "m-Q6_K.gguf",
    "README.md",
]
VECTOR = Stored(0, (8,), bytes(32))


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        ("Q4_K_M", NAMES[:1]),
        ("q4_k_m", NAMES[:1]),
        ("Q8_0", NAMES[2:3]),
        ("m-Q4_K_S.gguf", NAMES[1:2]),
        ("M-q4_k_s", NAMES[1:2]),
        ("bf16", NAMES[4:6]),
        ("UD-Q6_K", NAMES[6:7]),
        ("m-Q6_K", NAMES[7:8]),
    ],
)
def test_a_name_fits_exactly_in_any_case(wanted: str, parts: list[str]) -> None:
    assert choose(NAMES, wanted, "here") == parts


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("Q4_K", r"--gguf Q4_K fits no file of here\. There are: BF16/m-BF16-00001-of-00002\.gguf, m-Q4_K_M\.gguf"),
        ("F16", "fits no file"),
        ("mmproj-m-F16.gguf", "fits no file"),
        ("Q6_K", r"fits several files of here: m-Q6_K\.gguf, m-UD-Q6_K\.gguf\. Give the whole name"),
        (None, "several GGUF models"),
    ],
)
def test_none_or_several_are_an_error_with_the_list(wanted: str | None, message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        choose(NAMES, wanted, "here")


def test_a_file_and_a_folder_are_sources(tmp_path: Path) -> None:
    """A vision encoder beside the only model is none; safetensors come first where nothing else is asked for."""
    file = write(tmp_path / "m-Q8_0.GGUF", {}, {"a": VECTOR})
    write(tmp_path / "mmproj-m.gguf", {}, {"a": VECTOR})
    for name, gguf in ((file, None), (tmp_path, None), (tmp_path, "q8_0")):
        assert source.resolve(str(name), gguf=gguf) == file
    (tmp_path / "model.safetensors").touch()
    assert source.resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ModelFilesAway, match=r"absent\.gguf does not exist"):
        source.resolve(str(tmp_path / "absent.gguf"))


def split(folder: Path, count: int = 3) -> list[Path]:
    """A model in parts of one tensor each."""
    paths = [folder / f"m-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    for number, path in enumerate(paths):
        fields: dict[str, Any] = {"split.no": number, "split.count": count, "split.tensors.count": count}
        write(path, fields, {f"t{number}": VECTOR})
    return paths


def test_parts_are_read_as_one(tmp_path: Path) -> None:
    """By whichever part the model is named."""
    paths = split(tmp_path)
    assert source.resolve(str(tmp_path)) == paths[0]
    for path in paths:
        model = read_model(path)
        assert model.files == paths and list(model.tensors) == ["t0", "t1", "t2"]
        assert [one.path for one in model.tensors.values()] == paths


def test_a_part_that_is_missing_or_of_another_model_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    content = paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(ModelFilesAway, match=r"lacks 1 of the model's 3 files: m-00002-of-00003\.gguf"):
        read_model(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ModelFilesError, match=r"m-00002-of-00003\.gguf is part 2 \(from 0\) of 3 by its metadata"):
        read_model(paths[0])
    paths[1].write_bytes(content.replace(b"t1", b"t0"))
    with pytest.raises(ModelFilesError, match=r"has the tensor t0, which m-00001-of-00003\.gguf has as well"):
        read_model(paths[0])
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(content)
    with pytest.raises(ModelFilesError, match="part of a model of 3 files, but its name does not say so"):
        read_model(alone)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for the hub, whose repositories are folders; the names of the files that are fetched."""
    fetched: list[str] = []

    def download(repository: str, name: str, **_: Any) -> str:
        fetched.append(f"{repository}/{name}")
        if not (path := tmp_path / repository / name).is_file():
            raise EntryNotFoundError(f"404 {name}")
        cached = tmp_path / "cache" / f"models--{repository.replace('/', '--')}" / "snapshots" / "1" / name
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_bytes(path.read_bytes())
        return str(cached)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(
        huggingface_hub,
        "list_repo_files",
        lambda repository, revision: [path.name for path in (tmp_path / repository).glob("*")],
    )
    monkeypatch.setattr(source, "reach", lambda *_: None)
    return fetched


def test_of_a_repository_only_the_file_that_is_meant_is_fetched(tmp_path: Path, hub: list[str]) -> None:
    folder = tmp_path / "org" / "m-GGUF"
    folder.mkdir(parents=True)
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf"):
        write(folder / name, vocabulary(), {"a": VECTOR})
    path = source.resolve("org/m-GGUF", cache=tmp_path / "cache", gguf="Q4_0")
    assert path.name == "m-Q4_0.gguf" and hub == ["org/m-GGUF/m-Q4_0.gguf"]
    with pytest.raises(ModelFilesError, match=r"several GGUF models: m-Q4_0\.gguf, m-Q8_0\.gguf"):
        source.resolve("org/m-GGUF", cache=tmp_path / "cache")
    with pytest.raises(ModelFilesError, match=r"--gguf Q5_0 fits no file of Repository org/m-GGUF"):
        source.resolve("org/m-GGUF", cache=tmp_path / "cache", gguf="Q5_0")


def test_a_tokenizer_is_fetched_from_the_base_repository(tmp_path: Path, hub: list[str]) -> None:
    """Only where the file has none that can be read, and its repository neither."""
    for name in ("m-GGUF", "m"):
        (tmp_path / "org" / name).mkdir(parents=True)
    write(tmp_path / "org" / "m-GGUF" / "m.gguf", vocabulary() | {"tokenizer.ggml.pre": "new"}, {"a": VECTOR})
    with pytest.raises(ModelFilesError, match=r"'new', an unknown pre-tokenizer.*Tried instead: .*tokenizer\.json"):
        source.resolve("org/m-GGUF", cache=tmp_path / "cache", gguf="m")
    (tmp_path / "org" / "m" / "tokenizer.json").write_text('{"base": 1}')
    (tmp_path / "org" / "m" / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    path = source.resolve("org/m-GGUF", cache=tmp_path / "cache", gguf="m")
    described = describe(read_model(path))
    assert described.tokenizer_json == '{"base": 1}' and described.eos_ids == [5, 6]
    assert described.chat_template == gguf_models.models.TEMPLATE


def test_a_tokenizer_beside_the_file_is_taken_where_the_file_has_none(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {"tokenizer.ggml.eos_token_id": 3, "x": struct.pack("<IB", 7, 1)}, {"a": VECTOR})
    with pytest.raises(ModelFilesError, match=r"m\.gguf has no tokenizer\. Tried instead: .*/tokenizer\.json"):
        describe(read_model(file))
    (tmp_path / "tokenizer.json").write_text('{"beside": 1}')
    described = describe(read_model(file))
    assert described.tokenizer_json == '{"beside": 1}' and described.eos_ids == [3]
