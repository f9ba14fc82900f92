"""External engines' names and options; and what each can serve."""

from __future__ import annotations

import pytest

from control.engines import (
    ENGINES,
    OWN,
    adapter_in,
    check_adapters,
    check_engine,
    named_values,
    parse_adapters,
    parse_arguments,
    refuse,
)
from control.errors import RequestError, SettingsError
from control.messages import Grammar, ReasoningBudget, Sampling
from control.operations.spec import build_spec

BUDGET = ReasoningBudget(tokens=8, open="<o>", close="<c>", closing=[1], opening=[2])


def test_options_are_those_of_a_list() -> None:
    check_engine("vllm", {"max-model-len": "32768", "enforce-eager": "true", "gpu-memory-utilization": "0.85"})
    check_engine(OWN, {})


@pytest.mark.parametrize(
    ("engine", "arguments", "named"),
    [
        ("tgi", {}, "'tgi'"),
        (OWN, {"max-model-len": "1"}, "Furrow's own engine takes none"),
        ("vllm", {"trust-remote-code": "true"}, "trust-remote-code"),
        ("vllm", {"host": "0.0.0.0"}, "host"),
        ("vllm", {"api-key": "x"}, "api-key"),
        ("sglang", {"port": "80"}, "port"),
        ("llama-server", {"model": "/etc/passwd"}, "model"),
        ("vllm", {"max-model-len": "many"}, "'many' is no int"),
        ("vllm", {"dtype": "a b;c"}, "no word"),
        ("vllm", {"quantization": "--load-format=pt"}, "no word"),
        ("vllm", {"enforce-eager": "yes"}, "no flag"),
    ],
)
def test_other_options_and_engines_are_refused_by_name(engine: str, arguments: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        check_engine(engine, arguments)


def test_no_list_has_an_option_for_code_hosts_files_or_secrets() -> None:
    forbidden = ("remote", "host", "port", "key", "path", "plugin", "template", "middleware", "ssl", "url")
    for engine in ENGINES.values():
        for option in engine.options:
            assert not any(word in option for word in forbidden), (engine.name, option)


def test_arguments_are_named_once() -> None:
    assert parse_arguments(["max-num-seqs=4", "--enforce-eager"]) == {"max-num-seqs": "4", "enforce-eager": "true"}
    with pytest.raises(SettingsError, match="twice"):
        parse_arguments(["a=1", "a=2"])


def test_values_of_a_repeatable_option_have_a_name_each() -> None:
    assert named_values("--engine-python", ["vllm=/a=b", "sglang=/c"]) == {"vllm": "/a=b", "sglang": "/c"}
    for texts in (["vllm"], ["vllm="], ["=/a"], ["vllm=/a", "vllm=/b"]):
        with pytest.raises(SettingsError, match="--engine-python"):
            named_values("--engine-python", texts)


def test_adapters_are_named_files_of_an_external_engine() -> None:
    assert parse_adapters(["sql=/a/b"]) == {"sql": "/a/b"}
    assert parse_adapters(["sql=b"])["sql"].startswith("/"), "hosts don't know this shell's folder"
    check_adapters("vllm", {"sql": "/a/b", "chat-2.1": "/c"})
    check_adapters(OWN, {})


@pytest.mark.parametrize(
    ("engine", "adapters", "named"),
    [
        (OWN, {"sql": "/a"}, "own engine"),
        ("vllm", {"a:b": "/a"}, "'a:b'"),
        ("vllm", {"sql": "a"}, "absolute"),
        ("vllm", {"sql": "/a,b"}, "commas"),
        ("vllm", {str(one): "/a" for one in range(65)}, "65 adapters"),
    ],
)
def test_adapters_that_can_not_be_served_are_refused(engine: str, adapters: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        check_adapters(engine, adapters)


@pytest.mark.parametrize("texts", [["sql"], ["sql="], ["sql=/a", "sql=/b"]])
def test_an_adapter_has_one_name_and_one_path(texts: list[str]) -> None:
    with pytest.raises(SettingsError, match="sql"):
        parse_adapters(texts)


@pytest.mark.parametrize(
    ("model", "adapter"), [("m:sql", "sql"), ("qwen3:0.6b", ""), ("sql", ""), ("m", ""), ("org/m:sql", "sql")]
)
def test_a_name_means_an_adapter_behind_its_last_colon(model: str, adapter: str) -> None:
    assert adapter_in(model, ["sql"]) == adapter


@pytest.mark.parametrize(
    ("engine", "sampling", "field"),
    [
        ("vllm", {"typical_p": 0.5}, "typical_p"),
        ("vllm", {"bad_words": [[1, 2]]}, "bad_words"),
        ("vllm", {"prompt_logprobs": 0}, "prompt_logprobs"),
        ("sglang", {"repetition_penalty": 1.1}, "repetition_penalty"),
        ("sglang", {"grammar": Grammar("lark", "start: x")}, "grammar"),
        ("llama-server", {"prompt_logprobs": 0}, "prompt_logprobs"),
        ("llama-server", {"grammar": Grammar("regex", "a+")}, "grammar"),
        ("llama-server", {"grammar": Grammar("json_object"), "presence_penalty": 1.0}, "presence_penalty"),
        ("vllm", {"grammar": Grammar("json_object"), "reasoning": BUDGET}, "reasoning"),
    ],
)
def test_a_request_is_refused_with_the_engine_and_the_field(
    engine: str, sampling: dict[str, object], field: str
) -> None:
    with pytest.raises(RequestError, match=field) as refused:
        refuse(engine, Sampling(max_tokens=5, **sampling))  # type: ignore[arg-type]
    assert refused.value.param == field and ENGINES[engine].title in str(refused.value)


def test_what_an_engine_can_do_passes() -> None:
    everywhere = Sampling(max_tokens=5, temperature=0.3, top_p=0.9, top_k=4, min_p=0.1, stop=["x"], frequency_penalty=1)
    for engine in (OWN, *ENGINES):
        refuse(engine, everywhere)
        refuse(engine, Sampling(max_tokens=5, grammar=Grammar("json_schema", "{}")))
    with pytest.raises(RequestError, match="images"):
        refuse("vllm", everywhere, images=True)


def test_a_specification_names_its_engine_and_no_option_of_another() -> None:
    spec = build_spec("org/name", engine="vllm", engine_args=["max-model-len=512"], tp=4, devices=None)
    assert (spec.engine, spec.engine_args, spec.tp, spec.group_size) == ("vllm", {"max-model-len": "512"}, 4, 1)
    assert build_spec("org/name").group_size == 1 and build_spec("org/name", tp=2).group_size == 2
    for option in ({"quant": "int8"}, {"kv_tokens": 100}, {"dtype": "float32"}, {"deterministic": True}):
        with pytest.raises(SettingsError, match="Furrow's own engine"):
            build_spec("org/name", engine="vllm", **option)  # type: ignore[arg-type]
