"""The options of `qspec batch --ray`."""

from __future__ import annotations

import argparse
from functools import partial

from sglang_qspec import values
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools import declare

DEFAULTS = {
    "min_servers": 1,
    "max_servers": None,
    "target_gpus": None,
    "draft_gpus": 0,
    "server_cpus": None,
    "sidecars": 0,
    "sidecar_resource": None,
}
"""Defaults of the options that need --ray; None is decided on the cluster."""
MOST = 100_000


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to those of `qspec batch`."""
    add = partial(declare.value, parser.add_argument_group("servers on a Ray cluster"))
    counted, positive = values.whole(0, MOST), values.whole(1, MOST)
    add(
        "--ray",
        "run the servers on this Ray cluster: HOST:PORT, auto for the one of this node, or local "
        "for a new one on this machine",
        metavar="ADDRESS",
    )
    add(
        "--min-servers",
        "number of servers that must run before the first line is asked (default: 1)",
        positive,
        "N",
    )
    add(
        "--max-servers",
        "maximum number of servers (default: as many as the cluster holds at the start)",
        positive,
        "N",
    )
    targets = "GPUs of each target (default: 1, or 0 on a cluster without GPUs)"
    add("--target-gpus", targets, counted, "N")
    drafts = "GPUs of each sidecar: 0 or 1 (default: 0, it shares the GPU of its target)"
    add("--draft-gpus", drafts, counted, "N")
    cpus = "CPUs of each server (default: 1 beside GPUs, and 2 without)"
    add("--server-cpus", cpus, positive, "N")
    sidecars = "number of sidecars that all servers share, instead of one in each server"
    add("--sidecars", sidecars, counted, "N")
    add(
        "--sidecar-resource",
        "custom resource of Ray that a node must have to run one of the shared sidecars",
        metavar="NAME",
    )


def settle(options: argparse.Namespace) -> None:
    """Check the options, and replace those that are not given by their defaults.

    Raises ConfigError.
    """
    given = [name for name in DEFAULTS if getattr(options, name) is not None]
    if options.ray is None and given:
        raise ConfigError(f"--{given[0].replace('_', '-')} needs --ray")
    for name in set(DEFAULTS).difference(given):
        setattr(options, name, DEFAULTS[name])
    if options.ray is None:
        return
    if "://" in options.ray:
        raise ConfigError(
            f"--ray is {options.ray!r}, but must be 'local', 'auto', or the HOST:PORT of a Ray "
            "cluster; run the command on a node of the cluster"
        )
    if options.url:
        raise ConfigError("--ray starts servers, and excludes --url")
    most = options.max_servers
    if most is not None and most < options.min_servers:
        raise ConfigError(
            f"--max-servers is {most}, but must be at least --min-servers, {options.min_servers}"
        )
    if options.draft_gpus > 1:
        raise ConfigError(f"--draft-gpus is {options.draft_gpus}, but must be 0 or 1")
    if options.draft_gpus and options.target_gpus == 0:
        raise ConfigError("--draft-gpus is for targets on GPUs, but --target-gpus is 0")
    if options.sidecars and not (options.model and options.draft_model):
        raise ConfigError("--sidecars needs --model and --draft-model")
    if options.sidecar_resource and not options.sidecars:
        raise ConfigError("--sidecar-resource needs --sidecars")
