"""A model's name becomes its specification."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from control.errors import SettingsError
from control.operations.spec import build_spec, model_source
from control.settings import demo_model
from ops.cli.options import demo_environment
from ops.demo import MODEL_DIR


def test_demo_is_the_folder_that_the_process_knows(tmp_path: Path) -> None:
    spec = build_spec("demo", demo=tmp_path)
    assert (spec.name, spec.source) == ("demo", str(tmp_path))


def test_demo_is_refused_where_its_folder_is_not_known() -> None:
    with pytest.raises(SettingsError, match="FURROW_DEMO_MODEL"):
        model_source("demo")


def test_a_folder_is_named_by_its_last_part_and_a_repository_by_its_id(tmp_path: Path) -> None:
    assert build_spec(str(tmp_path)).name == tmp_path.name
    spec = build_spec("some/model")
    assert (spec.name, spec.source) == ("some/model", "some/model")


def test_the_command_tells_an_api_process_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting of the environment is kept."""
    monkeypatch.delenv("FURROW_DEMO_MODEL", raising=False)
    environment = demo_environment()
    assert environment == {"FURROW_DEMO_MODEL": str(MODEL_DIR)}
    monkeypatch.setenv("FURROW_DEMO_MODEL", "/elsewhere")
    assert demo_environment() == {}
    assert demo_model() == Path("/elsewhere")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": "cuda:0"}, "not offered on cuda:0"),
        ({"devices": "cpu,cuda:0", "tp": 2}, "not offered on cuda:0"),
        ({"dtype": "float64"}, "not in --dtype float64"),
        ({"dtype": "bfloat16"}, "not in --dtype bfloat16"),
    ],
)
def test_deterministic_is_refused_where_it_can_t_hold(options: dict[str, Any], words: str) -> None:
    """With the reason and a remedy; without the option the same model is accepted."""
    with pytest.raises(SettingsError, match=words) as refused:
        build_spec("some/model", deterministic=True, **options)
    assert "leave --deterministic out" in str(refused.value)
    assert not build_spec("some/model", **options).deterministic


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_type": "q4_0"}, "--kv-type q4_0 is unknown: use one of auto, f32, f16, bf16, q8_0"),
        ({"kv_type": "f16", "dtype": "float64"}, "computed in float32, not in --dtype float64"),
        ({"kv_type": "q8_0", "devices": "cuda:0"}, "--kv-type q8_0 is for CPUs, not for cuda:0"),
        ({"kv_type": "q8_0", "engine": "vllm"}, "--kv-type is an option of Furrow's own engine"),
    ],
)
def test_a_type_of_keys_and_values_is_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        build_spec("/m", **options)
    assert build_spec("/m", kv_type="q8_0", tp=2).devices == ["cpu", "cpu"]


def test_deterministic_selects_cpus() -> None:
    """Where no devices are named."""
    spec = build_spec("some/model", deterministic=True, tp=2)
    assert spec.deterministic and spec.devices == ["cpu", "cpu"]


def test_defaults_of_sampling_are_checked_numbers() -> None:
    assert build_spec("org/m", sampling=["temperature=0.6", "top_k=20"]).sampling == {"temperature": 0.6, "top_k": 20}
    assert build_spec("org/m", sampling={"top_p": 0.9}).sampling == {"top_p": 0.9}


@pytest.mark.parametrize("text", ["temperature", "temperature=warm", "temperature=9", "max_tokens=5", "top_p=nan"])
def test_other_defaults_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--default"):
        build_spec("org/m", sampling=[text])


def test_a_tiny_model_has_exact_products_and_no_chance() -> None:
    """Unless it is told otherwise."""
    tiny = build_spec("smollm2")
    assert tiny.dequantize and tiny.sampling == {"temperature": 0.0}
    other = build_spec("smollm2", quant="int8", sampling=["temperature=1"])
    assert not other.dequantize and other.sampling == {"temperature": 1.0}
    assert not build_spec("org/smollm2").dequantize
