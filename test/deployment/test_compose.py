"""docs/deployment/compose.yaml is valid, and its parts agree with each other and the programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
import yaml

from sglang_qspec.cpu.install import install_kernels
from test.deployment.manifests import (
    FOLDER,
    Document,
    compose,
    read_router,
    read_server,
    read_sidecar,
)
from test.deployment.recording_server import RecordingServer

SERVICES: dict[str, Document] = compose()["services"]
SERVERS = ("server-0", "server-1")
SCHEMA: Document = json.loads(
    (files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text()
)


def validate(document: Document) -> None:
    """Raise ValidationError unless the document is a compose file."""
    jsonschema.validators.validator_for(SCHEMA)(SCHEMA).validate(document)


def gpus(service: str) -> list[str]:
    reserved = SERVICES[service].get("deploy", {}).get("resources", {}).get("reservations", {})
    found: list[str] = [number for d in reserved.get("devices", ()) for number in d["device_ids"]]
    return found


def test_the_file_fits_the_specification() -> None:
    validate(compose())


def test_the_specification_refuses_a_wrong_field() -> None:
    wrong = compose()
    wrong["services"]["router"]["helthcheck"] = {}
    with pytest.raises(jsonschema.ValidationError, match="helthcheck"):
        validate(wrong)


def test_the_programs_take_the_arguments() -> None:
    install_kernels()
    sidecar = read_sidecar(SERVICES["sidecar"]["command"])
    router = read_router(SERVICES["router"]["command"])
    for name in SERVERS:
        server = read_server(SERVICES[name]["command"])
        host, port = server.speculative_qspec_endpoint.removeprefix("tcp://").split(":")
        assert host in SERVICES
        assert sidecar.endpoint == f"tcp://0.0.0.0:{port}"
        assert server.speculative_qspec_key_file == sidecar.key_file
        assert f"http://{name}:{server.port}" in router.worker_urls
    assert len(router.worker_urls) == len(SERVERS)
    assert router.disable_circuit_breaker
    assert SERVICES["router"]["ports"] == [f"127.0.0.1:{router.port}:{router.port}"]


def test_a_wrong_argument_is_found() -> None:
    with pytest.raises(SystemExit):
        read_sidecar([*SERVICES["sidecar"]["command"], "--keyfile=x"])
    with pytest.raises(SystemExit):
        read_router(["--policy=nearest"])


@pytest.mark.parametrize("service", SERVICES)
def test_a_health_check_asks_at_the_port_of_its_service(service: str) -> None:
    path = {"router": "/readiness", "sidecar": "/health"}.get(service, "/health_generate")
    flag = "--metrics-port=" if service == "sidecar" else "--port="
    (port,) = [text for text in SERVICES[service]["command"] if text.startswith(flag)]
    command = SERVICES[service]["healthcheck"]["test"]
    assert command[:3] == ["CMD", "python3", "-c"]
    assert f"'http://127.0.0.1:{port.removeprefix(flag)}{path}'" in command[3]


@pytest.mark.parametrize("service", SERVICES)
def test_a_health_check_fails_while_the_service_is_not_healthy(service: str) -> None:
    *_, program = SERVICES[service]["healthcheck"]["test"]
    with RecordingServer() as server:
        asked = re.sub(r"http://127\.0\.0\.1:\d+", server.url, program)
        command = [sys.executable, "-c", asked]
        assert subprocess.run(command).returncode == 0
        server.is_healthy = False
        assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0


def test_only_the_router_is_reachable_from_outside() -> None:
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["router"]
    networks: dict[str, Any] = compose()["networks"]
    outside = {name for name, options in networks.items() if not options.get("internal")}
    joined = {name: set(service["networks"]) for name, service in SERVICES.items()}
    assert [name for name, found in joined.items() if found & outside] == ["router"]
    assert not joined["router"] & joined["sidecar"]
    for name in SERVERS:
        assert joined[name] & joined["router"]
        assert joined[name] & joined["sidecar"]


def test_each_server_and_the_sidecar_have_a_gpu_of_their_own() -> None:
    taken = [number for name in SERVICES for number in gpus(name)]
    assert sorted(taken) == ["0", "1", "2"]
    assert not gpus("router")


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_has_privileges(service: str) -> None:
    found = SERVICES[service]
    assert found["user"] == "10001:10001"
    assert found["read_only"] is True
    assert found["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in found["security_opt"]
    assert not {"privileged", "cap_add", "network_mode", "pid"} & found.keys()


def test_the_key_is_mounted_where_the_programs_look_for_it() -> None:
    secrets = compose()["secrets"]
    for name in (*SERVERS, "sidecar"):
        (secret,) = SERVICES[name]["secrets"]
        assert secret["source"] in secrets
        flag = next(text for text in SERVICES[name]["command"] if "key-file=" in text)
        assert flag.endswith("=" + secret["target"])
    assert "secrets" not in SERVICES["router"]


def test_a_build_names_a_stage_of_the_dockerfile() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    for service in SERVICES.values():
        assert service["build"]["target"] in stages
        assert service["image"].startswith(f"qspec-{service['build']['target']}:")
        assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_router_waits_for_a_server_that_starts_late() -> None:
    waits = read_router(SERVICES["router"]["command"]).worker_startup_timeout_secs
    for name in SERVERS:
        start = SERVICES[name]["healthcheck"]["start_period"]
        assert waits > 2 * 60 * int(start.removesuffix("m"))


def test_the_grace_of_the_router_is_longer_than_that_of_its_requests() -> None:
    router = SERVICES["router"]
    seconds = read_router(router["command"]).shutdown_grace_period_secs
    assert int(yaml.safe_load(router["stop_grace_period"].rstrip("s"))) > seconds
