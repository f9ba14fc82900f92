"""compose.yaml is sound: as far as it can be judged without a Docker engine."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from ops.cli import cli
from tests.unit.ops.command_line import parse
from tests.unit.ops.compose_file import COMPOSE, ROOT, MissingVariable, read

SCHEMA = Path(__file__).with_name("compose-spec.json")
"""schema/compose-spec.json of github.com/compose-spec/compose-spec at 170098b, Apache License 2.0."""
ONE_SHOT = {"load", "load-gpu"}


@pytest.fixture
def compose() -> dict[str, Any]:
    return read(REDIS_PASSWORD="secret")


def test_it_is_what_the_compose_specification_asks(compose: dict[str, Any]) -> None:
    """Valid by the specification's own schema, which notices a mistake."""
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft7Validator(schema).validate(compose)
    compose["services"]["api"]["helthcheck"] = {}
    with pytest.raises(jsonschema.ValidationError, match="helthcheck"):
        jsonschema.Draft7Validator(schema).validate(compose)


def test_without_a_password_nothing_starts() -> None:
    """The message says what to do."""
    with pytest.raises(MissingVariable, match=r"put REDIS_PASSWORD=… into \.env"):
        read()


def test_services_for_gpus_need_their_profile(compose: dict[str, Any]) -> None:
    """Plain `up` gives redis, api and a worker with two ranks; what needs a GPU waits for its profile."""
    by_profile = {name: service.get("profiles", []) for name, service in compose["services"].items()}
    assert by_profile == {
        "redis": [],
        "api": [],
        "worker": [],
        "load": [],
        "worker-gpu": ["gpu"],
        "load-gpu": ["gpu"],
    }
    assert "--tp 2 --devices cpu" in " ".join(compose["services"]["load"]["command"])


def test_only_the_gpu_worker_reserves_devices(compose: dict[str, Any]) -> None:
    """All NVIDIA GPUs of the machine."""
    reserved = {name: service["deploy"] for name, service in compose["services"].items() if "deploy" in service}
    devices = [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    assert reserved == {"worker-gpu": {"resources": {"reservations": {"devices": devices}}}}


def test_whoever_stays_has_a_health_check_and_waits_for_the_healthy(compose: dict[str, Any]) -> None:
    """A condition on health needs a service that has one."""
    services = compose["services"]
    assert {name for name, service in services.items() if "healthcheck" not in service} == ONE_SHOT
    for name, service in services.items():
        waits = service.get("depends_on", {})
        assert waits == ({} if name == "redis" else {"redis": {"condition": "service_healthy"}})


@pytest.mark.parametrize("name", ["api", "worker", "load", "worker-gpu", "load-gpu"])
def test_each_command_is_one_that_furrow_understands(compose: dict[str, Any], name: str) -> None:
    """Parsed by the real command line, down to the last option."""
    program, *arguments = compose["services"][name]["command"]
    assert program == "furrow"
    assert parse(cli, arguments) == arguments[: 2 if arguments[0] == "models" else 1]


def test_a_wrong_option_would_be_noticed(compose: dict[str, Any]) -> None:
    """The parse is a check, not a formality."""
    for arguments in (["worker", "--prot", "1"], ["api", "--prot", "1"], ["models", "laod"], ["wroker"]):
        with pytest.raises(click.UsageError):
            parse(cli, arguments)


def test_health_checks_run_modules_that_exist(compose: dict[str, Any]) -> None:
    """`python -m` something that has a main."""
    for service in compose["services"].values():
        kind, *words = service.get("healthcheck", {}).get("test", ["CMD-SHELL"])
        if kind == "CMD":
            assert words[:2] == ["python", "-m"]
            assert callable(importlib.import_module(words[2]).main)


def test_the_api_is_published_on_this_machine_only_and_on_its_own_port(compose: dict[str, Any]) -> None:
    """The container's port is the one in the command and in the health check."""
    api = compose["services"]["api"]
    assert api["ports"] == ["127.0.0.1:8000:8000"]
    assert "--keys" in api["command"]
    assert api["command"][-2:] == ["--port", "8000"]
    module = importlib.import_module(api["healthcheck"]["test"][3])
    assert module.main.__defaults__ == ("http://127.0.0.1:8000/health",)
    assert [name for name, service in compose["services"].items() if "ports" in service] == ["api"]


def test_every_variable_in_a_container_is_one_that_the_code_reads(compose: dict[str, Any]) -> None:
    """A misspelt setting would be ignored in silence."""
    code = "\n".join(path.read_text() for part in ("control", "api", "worker") for path in (ROOT / part).rglob("*.py"))
    read_by_code = set(re.findall(r"[\"'](FURROW_\w+|REDIS_URL|HF_\w+)[\"']", code))
    for name, service in compose["services"].items():
        given = set(service.get("environment", {}))
        assert given <= ({"REDISCLI_AUTH"} if name == "redis" else read_by_code), name


def test_every_variable_of_the_file_is_documented() -> None:
    """docs/deployment.md names what can be set from outside."""
    text = (ROOT / "docs" / "deployment.md").read_text()
    names = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    assert names and {name for name in names if f"`{name}`" not in text} == set()


def test_volumes_are_declared(compose: dict[str, Any]) -> None:
    """Named volumes only: nothing of the host's folders."""
    used = {volume.split(":")[0] for service in compose["services"].values() for volume in service.get("volumes", [])}
    assert used == set(compose["volumes"])


def test_the_file_for_metrics_adds_to_this_one() -> None:
    """Valid by the same schema; what it mounts is in the repository, what it publishes is for this machine, and the
    port of agents is the one that Prometheus scrapes."""
    added = yaml.safe_load((ROOT / "compose.metrics.yaml").read_text())
    jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).validate(added)
    services, base = added["services"], yaml.safe_load(COMPOSE.read_text())["services"]
    for name, service in services.items():
        assert name in base or "image" in service
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service.get("volumes", []):
            where = volume.split(":")[0]
            assert (ROOT / where).is_dir() if where.startswith(".") else where in added["volumes"]
    jobs = yaml.safe_load((ROOT / "ops/prometheus/prometheus.yaml").read_text())["scrape_configs"]
    ports_by_name = {
        name: job["dns_sd_configs"][0]["port"] for job in jobs for name in job["dns_sd_configs"][0]["names"]
    }
    assert ports_by_name.keys() <= base.keys() and ports_by_name["api"] == 8000
    for name in ("worker", "worker-gpu"):
        assert services[name]["environment"]["FURROW_METRICS"] == f"0.0.0.0:{ports_by_name[name]}"


def test_the_examples_with_vllm_are_valid_as_far_as_can_be_judged() -> None:
    """docs/engines.md: the first by the specification's schema; the commands of both by the real parsers."""
    page = (ROOT / "docs/engines.md").read_text()
    added, deployment = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.S))
    jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).validate(added)
    assert yaml.safe_load(COMPOSE.read_text())["services"].keys() >= {"worker"}
    parse(cli, added["services"]["worker"]["command"][1:])
    pod = deployment["spec"]["template"]["spec"]
    worker = next(one for one in pod["containers"] if one["name"] == "worker")
    parse(cli, worker["args"][1:])
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert all(mount["name"] in volumes for one in pod["containers"] for mount in one["volumeMounts"])
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
