"""The objects in docs/deployment/kubernetes are valid, and agree with each other."""

from __future__ import annotations

import base64
import copy
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sglang_qspec.__main__ import main
from sglang_qspec.cpu.install import install_kernels
from sglang_qspec.link import keys
from test.deployment.manifests import (
    KUBERNETES,
    Document,
    admin_key_command,
    container,
    containers,
    kustomization,
    named,
    read_router,
    read_server,
    read_sidecar,
    resources,
    workloads,
)

VERSIONS = ("1.30", "1.37")
"""Oldest and newest release of Kubernetes whose schemas the objects are checked with."""
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
CLAIM = "models"
"""The only object that the operator supplies."""


def label(object_: Document) -> str:
    return f"{object_['kind']}-{object_['metadata']['name']}"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("object_", resources(), ids=label)
def test_an_object_fits_the_schema(object_: Document, version: str) -> None:
    kubernetes_validate.validate(object_, version, strict=True)


def test_the_schema_refuses_a_wrong_field() -> None:
    wrong = copy.deepcopy(named("StatefulSet")["server"])
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_the_kustomization_lists_every_file() -> None:
    listed = {*kustomization()["resources"], "kustomization.yaml"}
    assert listed == {path.name for path in KUBERNETES.glob("*.yaml")}


@pytest.mark.skipif(
    shutil.which("kubectl") is None,
    reason="there is no kubectl (https://kubernetes.io/docs/tasks/tools)",
)
def test_kubectl_builds_the_objects_once_there_are_keys(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path, dirs_exist_ok=True)
    for name in ("link.key", ".env"):
        (tmp_path / name).unlink(missing_ok=True)

    def build() -> subprocess.CompletedProcess[str]:
        command = ["kubectl", "kustomize", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True)

    assert build().returncode != 0
    assert main(["keys", str(tmp_path / "link.key")]) == 0
    assert build().returncode != 0
    subprocess.run(admin_key_command(), shell=True, check=True, cwd=tmp_path)
    done = build()
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert len(built) == len(resources()) + 2
    link, admin = [
        next(part for part in built if part["metadata"]["name"].startswith(name + "-"))
        for name in ("link-key", "admin-key")
    ]
    key = base64.b64decode(admin["data"]["QSPEC_ADMIN_KEY"]).decode()
    assert re.fullmatch("[0-9a-f]{64}", key)
    pods = [
        part["spec"]["template"]["spec"]
        for part in built
        if part["kind"] in ("StatefulSet", "Deployment")
    ]
    mounted = {
        volume["secret"]["secretName"]
        for pod in pods
        for volume in pod["volumes"]
        if "secret" in volume
    }
    assert mounted == {link["metadata"]["name"]}
    read = [
        variable["valueFrom"]["secretKeyRef"]
        for pod in pods
        for variable in pod["containers"][0].get("env", ())
    ]
    assert read == 2 * [{"name": admin["metadata"]["name"], "key": "QSPEC_ADMIN_KEY"}]
    assert all(part["metadata"].get("namespace", "qspec") == "qspec" for part in built)


def test_the_programs_take_the_arguments() -> None:
    install_kernels()
    server = read_server(container("server")["args"])
    sidecar = read_sidecar(container("sidecar")["args"])
    router = read_router(container("router")["args"])
    assert container("sidecar")["command"] == ["qspec", "sidecar"]
    host, port = server.speculative_qspec_endpoint.removeprefix("tcp://").split(":")
    assert named("Service")[host]["spec"]["selector"] == {"app": "sidecar"}
    assert sidecar.endpoint == f"tcp://0.0.0.0:{port}"
    assert ports_of("server") == {"http": server.port}
    assert ports_of("sidecar") == {"link": int(port), "metrics": sidecar.metrics_port}
    assert sidecar.metrics_host == "0.0.0.0"
    assert ports_of("router") == {"http": router.port, "metrics": router.prometheus_port}
    replicas = named("StatefulSet")["server"]["spec"]["replicas"]
    assert router.worker_urls == [
        f"http://server-{number}.server:{server.port}" for number in range(replicas)
    ]
    assert router.disable_circuit_breaker
    grace = workloads()["router"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > router.shutdown_grace_period_secs
    probe = container("server")["startupProbe"]
    start = probe["periodSeconds"] * probe["failureThreshold"]
    assert router.worker_startup_timeout_secs > 2 * start


def test_pods_with_a_gpu_tolerate_the_taint_of_its_node() -> None:
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    found = {name: template["spec"].get("tolerations") for name, template in workloads().items()}
    assert found == {"server": [taint], "sidecar": [taint], "router": None}


def ports_of(workload: str) -> dict[str, int]:
    """The ports of the main container, by name."""
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}


@pytest.mark.parametrize("name", workloads())
def test_a_service_and_the_probes_lead_to_ports_of_the_container(name: str) -> None:
    service = named("Service")[name]
    assert service["spec"]["selector"] == workloads()[name]["metadata"]["labels"]
    for port in service["spec"]["ports"]:
        assert ports_of(name)[port["targetPort"]] == port["port"]
    probes = [container(name)[kind] for kind in PROBES if kind in container(name)]
    assert len(probes) >= 2
    for probe in probes:
        assert probe["httpGet"]["port"] in ports_of(name)


def test_all_probes_of_the_sidecar_ask_for_its_health() -> None:
    assert [container("sidecar")[kind]["httpGet"] for kind in PROBES] == [
        {"path": "/health", "port": "metrics"}
    ] * len(PROBES)


@pytest.mark.parametrize(
    ("name", "port", "path"),
    [("sidecar", "metrics", "/metrics"), ("router", "http", "/engine_metrics")],
)
def test_prometheus_finds_the_metrics_and_may_ask_for_them(name: str, port: str, path: str) -> None:
    assert workloads()[name]["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(ports_of(name)[port]),
        "prometheus.io/path": path,
    }
    monitoring = {"namespaceSelector": {"matchLabels": {"qspec-monitoring": "true"}}}
    (opened,) = [ports for peer, ports in rules(name, "ingress") if peer == monitoring]
    assert port in opened


def test_the_stateful_set_names_its_service() -> None:
    name = named("StatefulSet")["server"]["spec"]["serviceName"]
    assert named("Service")[name]["spec"]["clusterIP"] == "None"


def test_a_workload_selects_its_own_pods() -> None:
    for kind in ("StatefulSet", "Deployment"):
        for object_ in named(kind).values():
            template = object_["spec"]["template"]["metadata"]["labels"]
            assert object_["spec"]["selector"]["matchLabels"] == template


def rules(policy: str, direction: str) -> Iterator[tuple[Document, set[Any]]]:
    """Each peer of a policy, with the ports that the rule opens."""
    end = {"ingress": "from", "egress": "to"}[direction]
    for rule in named("NetworkPolicy")[policy]["spec"].get(direction, ()):
        for peer in rule[end]:
            yield peer, {port["port"] for port in rule["ports"]}


def pods(peer: Document) -> str | None:
    """The workload whose pods a peer selects, or None for another namespace."""
    selector = peer.get("podSelector")
    return None if selector is None else selector["matchLabels"]["app"]


def test_policies_open_only_the_way_from_router_to_server_to_sidecar() -> None:
    policies = named("NetworkPolicy")
    assert policies["default"]["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }
    for name in workloads():
        selected = policies[name]["spec"]["podSelector"]["matchLabels"]
        assert selected == workloads()[name]["metadata"]["labels"]
    opened = {name: list(rules(name, "ingress")) for name in policies}
    assert {name for name, found in opened.items() if found} == set(workloads())
    assert [(pods(peer), ports) for peer, ports in opened["server"]] == [("router", {"http"})]
    assert [(pods(peer), ports) for peer, ports in opened["sidecar"]] == [
        ("server", {"link"}),
        (None, {"metrics"}),
    ]
    assert {pods(peer) for peer, _ in opened["router"]} == {None}


@pytest.mark.parametrize(("source", "target"), [("router", "server"), ("server", "sidecar")])
def test_the_outgoing_rule_matches_the_incoming_rule(source: str, target: str) -> None:
    (outgoing,) = rules(source, "egress")
    assert pods(outgoing[0]) == target
    incoming = next(ports for peer, ports in rules(target, "ingress") if pods(peer) == source)
    assert outgoing[1] == {ports_of(target)[name] for name in incoming}


def test_no_container_has_privileges() -> None:
    assert named("Namespace")["qspec"]["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted"
    }
    for part, pod in containers():
        assert part["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        user = pod["securityContext"]
        assert user["runAsNonRoot"] is True
        assert user["runAsUser"] == user["runAsGroup"] == 10001
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert "memory" in part["resources"]["limits"]


def test_servers_and_sidecar_have_a_gpu_and_the_router_none() -> None:
    found = {name: container(name)["resources"]["limits"] for name in workloads()}
    asking = {name for name, limits in found.items() if limits.get("nvidia.com/gpu") == 1}
    assert asking == {"server", "sidecar"}


def test_a_mount_names_a_volume_and_a_volume_names_an_object() -> None:
    files = {part["name"]: part.get("files") for part in kustomization()["secretGenerator"]}
    for part, pod in containers():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in part["volumeMounts"]} <= volumes.keys()
        for volume in volumes.values():
            if "secret" in volume:
                assert files[volume["secret"]["secretName"]] == ["link.key"]
            elif "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"] == {"claimName": CLAIM, "readOnly": True}
            else:
                assert "emptyDir" in volume


@pytest.mark.parametrize(("name", "option"), [("server", "speculative_qspec_"), ("sidecar", "")])
def test_the_key_is_mounted_where_the_program_reads_it(name: str, option: str) -> None:
    read = read_server if name == "server" else read_sidecar
    (mount,) = [part for part in container(name)["volumeMounts"] if part["name"] == "key"]
    assert mount["readOnly"] is True
    read_from = getattr(read(container(name)["args"]), option + "key_file")
    assert read_from == f"{mount['mountPath']}/link.key"
    assert key_volume(name)["secret"]["secretName"] == "link-key"


def key_volume(name: str) -> Document:
    (found,) = [part for part in workloads()[name]["spec"]["volumes"] if part["name"] == "key"]
    assert isinstance(found, dict)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another group")
@pytest.mark.parametrize("name", ["server", "sidecar"])
def test_the_user_of_the_pod_can_read_the_key_and_no_other_user_can(name: str) -> None:
    """Kubernetes gives a secret's file to root and `fsGroup`, and lets both read it."""
    pod = workloads()[name]["spec"]["securityContext"]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "link.key"
        keys.create(path)
        os.chown(path, 0, pod["fsGroup"])
        path.chmod(key_volume(name)["secret"]["defaultMode"] | 0o440)
        assert loads(path, pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"])
        assert not loads(path, pod["runAsUser"] + 1, pod["runAsGroup"] + 1)
        path.chmod(0o444)
        assert not loads(path, pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"])


def loads(path: Path, user: int, *groups: int) -> bool:
    """Whether a process of this user and these groups, the first its own, can load the key."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgroups(groups)
            os.setgid(groups[0])
            os.setuid(user)
            keys.load(path)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
