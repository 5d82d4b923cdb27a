"""Reads the files in docs/deployment, and checks command lines with the parsers of the programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "docs" / "deployment"
KUBERNETES = FOLDER / "kubernetes"
Document = dict[str, Any]


def compose() -> Document:
    """The compose file, with its anchors and merges resolved."""
    found: Document = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return found


def kustomization() -> Document:
    found: Document = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    return found


def resources() -> list[Document]:
    """All objects of the files that the kustomization lists."""
    names: list[str] = kustomization()["resources"]
    return [part for name in names for part in yaml.safe_load_all((KUBERNETES / name).read_text())]


def named(kind: str) -> dict[str, Document]:
    """The objects of one kind, by name."""
    return {part["metadata"]["name"]: part for part in resources() if part["kind"] == kind}


def workloads() -> dict[str, Document]:
    """The templates of pods, by the name of their StatefulSet or Deployment."""
    found = {**named("StatefulSet"), **named("Deployment")}
    return {name: part["spec"]["template"] for name, part in found.items()}


def container(workload: str) -> Document:
    """The main container of a workload."""
    (found,) = workloads()[workload]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def containers() -> Iterator[tuple[Document, Document]]:
    """Each container, those of the start too, with the spec of its pod."""
    for template in workloads().values():
        spec = template["spec"]
        for part in [*spec.get("initContainers", ()), *spec["containers"]]:
            yield part, spec


def admin_key_command() -> str:
    """The command of the page that writes the admin key to `.env`, the same wherever it is."""
    page = (FOLDER.parent / "deployment.md").read_text()
    (command,) = {line.strip() for line in page.splitlines() if "openssl" in line}
    return command


def read_server(arguments: Sequence[str]) -> argparse.Namespace:
    """What the server's parser, with QSPEC's flags, reads. Exits if an argument is wrong."""
    from sglang.srt.server_args import ServerArgs

    from sglang_qspec.engine.start.flags import add_flags

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    if "--speculative-qspec-endpoint" not in parser.format_help():
        add_flags(None, parser)
    return parser.parse_args(list(arguments))


def read_sidecar(arguments: Sequence[str]) -> argparse.Namespace:
    """What the parser of `qspec sidecar` reads. Exits if it is wrong."""
    from sglang_qspec.sidecar import options

    parser = options.parser()
    parser.allow_abbrev = False
    return parser.parse_args(list(arguments))


def read_router(arguments: Sequence[str]) -> argparse.Namespace:
    """What the router's parser reads. Exits if it is wrong."""
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    RouterArgs.add_cli_args(parser)
    return parser.parse_args(list(arguments))
