"""Names of `--quant` are checked; and blocks are refused on hosts that can't run the C++ products; without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from control.errors import SettingsError
from control.messages import Assignment, ModelSpec
from control.operations.spec import build_spec
from control.quantization import BLOCK_QUANTS, QUANTS
from ops.demo import MODEL_DIR
from worker.native import compiled, host
from worker.repository import preparation, torch_part
from worker.weights.formats import BLOCK_FORMATS, format_for


def assignment(quant: str | None) -> Assignment:
    spec = ModelSpec(name="m", source=str(MODEL_DIR), devices=["cpu"], quant=quant)
    return Assignment(spec=spec, replica="r", devices=["cpu"], ranks=[0])


@pytest.mark.parametrize(
    ("given", "kept"), [("Q4_K", "q4k"), ("q4_k", "q4k"), ("q6k", "q6k"), ("Q8_0", "q8_0"), ("INT8", "int8")]
)
def test_names_are_taken_in_any_case(given: str, kept: str) -> None:
    assert build_spec(str(MODEL_DIR), quant=given).quant == kept


@pytest.mark.parametrize("given", ["q4", "q4_k_m", "q4_2k", ""])
def test_an_unknown_name_is_refused_with_the_list(given: str) -> None:
    with pytest.raises(SettingsError, match=rf"--quant {given} is unknown: use one of {', '.join(QUANTS)}"):
        build_spec(str(MODEL_DIR), quant=given)


def test_every_name_has_a_format() -> None:
    assert set(BLOCK_QUANTS.values()) == set(BLOCK_FORMATS)


@pytest.mark.parametrize(
    ("name", "inputs", "chosen"),
    [
        ("q4_k", 512, "q4_k"),
        ("q2_k", 96, "q4_0"),
        ("q3_k", 96, "q4_0"),
        ("q4_k", 96, "q5_0"),
        ("q5_k", 96, "q5_1"),
        ("q6_k", 96, "q8_0"),
        ("q4_0", 90, None),
        ("q6_k", 90, None),
    ],
)
def test_inputs_that_blocks_of_256_do_not_divide(name: str, inputs: int, chosen: str | None) -> None:
    weight_format = format_for(name, inputs)
    assert (None if weight_format is None else weight_format.name) == chosen


def test_a_host_that_runs_cpp_takes_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "unavailable", lambda: None)
    assert preparation.check(assignment("q4k")) == MODEL_DIR


def test_without_a_compiler_every_option_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unless a library was compiled before. The control: without one the reference in torch serves the model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(host, "processor_flags", lambda: frozenset(host.NEEDED["x86_64"]))
    monkeypatch.setattr(compiled, "compiler_command", lambda: None)
    for quant in ("q4k", "int8", "f16"):
        with pytest.raises(SettingsError, match=rf"--quant {quant} .* there is no C\+\+ compiler .* Leave it out"):
            preparation.check(assignment(quant))
    assert preparation.check(assignment(None)) == MODEL_DIR
    folder = tmp_path / "furrow" / "compiled"
    folder.mkdir(parents=True)
    (folder / "native-1.so").touch()
    with pytest.raises(SettingsError, match="no C"):  # one of another version
        preparation.check(assignment("q4k"))
    (folder / f"{compiled._stem(host.SOURCE, compiled.INSTRUCTIONS['AVX2'])}-9.so").touch()
    assert preparation.check(assignment("q4k")) == MODEL_DIR


def test_blocks_are_refused_where_cpp_is_switched_off_or_instructions_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "processor_flags", lambda: frozenset({"fma", "f16c"}))
    with pytest.raises(SettingsError, match="has no avx2"):
        preparation.check(assignment("q8_0"))
    monkeypatch.setenv(host.SWITCH, "0")
    with pytest.raises(SettingsError, match="FURROW_NATIVE is 0"):
        preparation.check(assignment("q8_0"))


@pytest.mark.parametrize(
    ("changes", "devices", "reason"),
    [
        ({"dtype": "float64"}, ["cpu"], "torch computes in float64"),
        ({}, ["cuda:0"], "GPUs are driven by torch"),
    ],
)
def test_without_torch_the_command_that_installs_it_is_named(
    changes: dict[str, Any], devices: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_part.importlib.util, "find_spec", lambda name: None)
    own_assignment = assignment(None)
    wanted = msgspec.structs.replace(
        own_assignment, devices=devices, spec=msgspec.structs.replace(own_assignment.spec, **changes)
    )
    told = (
        rf"{reason}, and torch and transformers are not installed .* -m pip install 'torch>=\S+' 'transformers>=\S+'`"
    )
    with pytest.raises(SettingsError, match=told):
        preparation.check(wanted)


def test_a_model_of_cpp_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_part.importlib.util, "find_spec", lambda name: None)
    preparation.check(assignment(None))
