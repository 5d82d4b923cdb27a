"""Checks of what the operating system gives a server: files, sockets and ports."""

from __future__ import annotations

import contextlib
import os
import resource
import socket

from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, failure, ok, warning

HOST = "127.0.0.1"
"""SGLang's default of --host."""
FEW_DESCRIPTORS = 1024
"""A process with fewer file descriptors may run out of them: each client of the server needs one,
and SGLang and torch open some hundred files."""


def descriptors(case: Case) -> Finding:
    """Whether server and sidecar may open enough files and sockets."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return ok("unlimited file descriptors")
    found = f"up to {hard} file descriptors in a process"
    if hard < FEW_DESCRIPTORS:
        return warning(
            f"only {found}", f"Raise the hard limit (ulimit -Hn) to at least {FEW_DESCRIPTORS}."
        )
    return ok(found)


def sockets(case: Case) -> Finding:
    """Whether server and sidecar can have a private socket; raises LinkError if not."""
    from sglang_qspec.link import PrivateEndpoint, abandoned

    with PrivateEndpoint() as private:
        parent = os.path.dirname(private.directory)
    left = len(list(abandoned()))
    found = f"private sockets work in {parent}"
    if left:
        folders = "1 folder" if left == 1 else f"{left} folders"
        return ok(f"{found}; the next server removes {folders} of killed servers")
    return ok(found)


def endpoint(case: Case) -> Finding:
    """Whether a server may connect to the sidecars that the settings name; raises LinkError."""
    from sglang_qspec.link import keys
    from sglang_qspec.link.address import check_connect

    assert case.settings is not None
    addresses = case.settings.endpoints
    key_pair = keys.load(case.settings.key_file) if case.settings.key_file else None
    for address in addresses:
        check_connect(address, key_pair)
    for address in addresses:
        path = address.removeprefix("ipc://")
        if path != address and not os.path.exists(path):
            return warning(
                f"no sidecar listens at {address}",
                f"Start it: qspec sidecar --endpoint {address} ...",
            )
    return ok(f"a server may connect to {', '.join(addresses)}")


def port(case: Case) -> Finding:
    """Whether a server can listen at its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, case.port))
        except PermissionError:
            return failure(
                f"this user may not listen at port {case.port}",
                "Give a port from 1024 up with --port.",
            )
        except OSError as error:
            return failure(
                f"{HOST}:{case.port} cannot be used ({error.strerror}){_owner(case.port)}",
                "Give another port with --port, or end the process that has this one.",
            )
    return ok(f"{HOST}:{case.port} is free")


def _owner(port: int) -> str:
    """The process that listens at a port, as a clause; empty if this user cannot see it."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for each in psutil.net_connections("tcp"):
            here = getattr(each.laddr, "port", None) == port
            if here and each.status == psutil.CONN_LISTEN and each.pid:
                return f": process {each.pid} ({psutil.Process(each.pid).name()}) listens there"
    return ""
