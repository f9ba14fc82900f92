"""Where a model's files come from: with the hub's client replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import save_file
from tqdm import tqdm

from control.errors import HubNeverReached, HubUnreachable, ModelFilesAway, ModelFilesError
from worker.repository import source
from worker.repository.download_progress import Downloaded


def fill(folder: Path) -> Path:
    """A complete model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(8)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands in for the hub's repository org/name."""
    folder = tmp_path / "hub" / "org" / "name"

    def download(repository: str, name: str, *, revision: str, cache_dir: Path, tqdm_class: type[tqdm[Any]]) -> str:
        path = tmp_path / "hub" / repository / name
        if not path.is_file():
            raise EntryNotFoundError(f"404 {name}")
        with tqdm_class(total=path.stat().st_size, desc=name) as bar:
            bar.update(path.stat().st_size)
        return str(path)

    def names(repository: str, *, revision: str) -> list[str]:
        root = tmp_path / "hub" / repository
        return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", names)
    monkeypatch.setattr(source, "reach", lambda *_: None)
    return fill(folder)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub at all."""

    def download(repository: str, name: str, **_: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


@pytest.mark.parametrize(
    ("explicit", "environment", "expected", "reason"),
    [
        (Path("/mine"), {"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/mine", "set explicitly"),
        (None, {"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a", "HF_HUB_CACHE"),
        (None, {"HF_HUB_CACHE": "", "HF_HOME": "/b"}, "/b/hub", "HF_HOME"),
        (None, {"HF_HOME": "", "XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub", "default"),
        (None, {}, str(Path("~/.cache/huggingface/hub").expanduser()), "default"),
    ],
)
def test_the_first_set_variable_names_the_cache(
    explicit: Path | None, environment: dict[str, str], expected: str, reason: str
) -> None:
    """An explicit place comes first, then HF_HUB_CACHE, HF_HOME, the default; an empty variable is unset."""
    assert source.cache_folder(explicit, environment) == (Path(expected), reason)


def test_a_folder_is_taken_as_it_is(tmp_path: Path, offline: None) -> None:
    """A local folder needs no network."""
    assert source.resolve(str(fill(tmp_path / "model"))) == tmp_path / "model"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere", "~/nowhere-at-all", "a/b/c", "org/na me"])
def test_neither_folder_nor_repository(name: str, offline: None) -> None:
    """A path that can only be a folder is not looked for on the hub."""
    with pytest.raises(ModelFilesError, match="does not exist"):
        source.resolve(name)


def test_a_complete_snapshot_is_used_offline(tmp_path: Path, offline: None) -> None:
    """The cache answers without a question to the hub, by branch and by commit."""
    root = tmp_path / "models--org--name"
    snapshot = fill(root / "snapshots" / "abc123")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc123")
    assert source.resolve("org/name", cache=tmp_path) == snapshot
    assert source.resolve("org/name", revision="abc123", cache=tmp_path) == snapshot


def test_an_incomplete_snapshot_is_not_used(tmp_path: Path, offline: None) -> None:
    """A cache without the tokenizer is completed from the hub; unreachable, that names file and repository."""
    root = tmp_path / "models--org--name"
    (fill(root / "snapshots" / "main") / "tokenizer.json").unlink()
    with pytest.raises(ModelFilesError, match=r"config.json of org/name is not in the cache .* can't be reached"):
        source.resolve("org/name", cache=tmp_path)


def test_a_repository_that_is_not_cached_is_fetched(hub: Path, tmp_path: Path) -> None:
    """A model that is not cached is downloaded."""
    assert source.resolve("org/name", cache=tmp_path / "cache") == hub


def test_a_download_is_told(hub: Path, tmp_path: Path) -> None:
    """Each file's end is, and in a long one how far it is."""
    told: list[Downloaded] = []
    source.resolve("org/name", cache=tmp_path / "cache", tell=told.append)
    assert any(str(one) == "downloading model.safetensors: 100 % of 0.0 MB" for one in told)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_missing_on_the_hub(name: str, hub: Path, tmp_path: Path) -> None:
    """A repository without a needed file is refused by file and repository."""
    (hub / name).unlink()
    with pytest.raises(ModelFilesError, match=f"{name} is missing in repository org/name"):
        source.resolve("org/name", cache=tmp_path / "cache")


def test_a_shard_missing_on_the_hub(hub: Path, tmp_path: Path) -> None:
    """The index of a sharded repository says which files are needed."""
    (hub / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}')
    with pytest.raises(ModelFilesError, match=r"part-1\.safetensors is missing in repository org/name"):
        source.resolve("org/name", cache=tmp_path / "cache")


@pytest.mark.parametrize(
    "index",
    ['{"weight_map": {"a": 1}}', '{"weight_map": {"a": null, "b": "x"}}', "null", '{"weight_map": {}}', "[" * 99_999],
    ids=["a number", "null for a file", "no object", "empty", "deep"],
)
def test_an_index_that_names_no_files(index: str, hub: Path, tmp_path: Path) -> None:
    """It is refused by repository, and no file is asked for."""
    (hub / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFilesError, match=r"index\.json of repository org/name can't be read: .*index\.json "):
        source.resolve("org/name", cache=tmp_path / "cache")


class Refused(OSError):
    """The error of huggingface_hub for a status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = type("Response", (), {"status_code": status})()


@pytest.mark.parametrize(
    ("error", "is_offline", "kind"),
    [
        (LocalEntryNotFoundError("no connection"), False, HubUnreachable),
        (LocalEntryNotFoundError("offline mode"), True, ModelFilesAway),
        (ConnectionResetError("cut"), False, HubUnreachable),
        (Refused(503), False, HubUnreachable),
        (Refused(429), False, HubUnreachable),
        (Refused(401), False, ModelFilesError),
        (Refused(404), False, ModelFilesError),
        (ValueError("no valid name"), False, ModelFilesError),
    ],
)
def test_errors_of_the_hub_say_whether_another_try_may_help(
    error: Exception, is_offline: bool, kind: type[ModelFilesError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that failed is no error of the model; a repository that is not there is."""

    def download(repository: str, name: str, **_: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    (tmp_path / "models--org--name").mkdir()  # some of it is here
    with pytest.raises(ModelFilesError, match="org/name") as raised:
        source.resolve("org/name", cache=tmp_path)
    assert type(raised.value) is kind


def test_a_name_that_no_cache_has_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hub the first question ends it, naming what was tried; the hub's client would ask for 28 s."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("it was asked"))
    with pytest.raises(HubNeverReached) as raised:
        source.resolve("org/name", cache=tmp_path)
    for part in (str(tmp_path), "org/name", "http://127.0.0.1:1", "Check the name", ".gguf"):
        assert part in str(raised.value)


def test_a_file_that_is_no_model_says_so(tmp_path: Path, offline: None) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelFilesError, match=r"notes\.txt is a file and no model: give a folder with config\.json"):
        source.resolve(str(tmp_path / "notes.txt"))
