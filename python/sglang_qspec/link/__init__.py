"""Connection between a server and its sidecar.

The server uses a `Link`: `SidecarLink` over ZMQ, or `FakeSidecarLink` within one process. The
sidecar uses a `LinkServer`. No other package imports ZMQ.
"""

from sglang_qspec.link.client import SidecarLink
from sglang_qspec.link.fake import FakeSidecarLink
from sglang_qspec.link.faults import Faults
from sglang_qspec.link.fingerprint import fingerprint
from sglang_qspec.link.keys import Keys
from sglang_qspec.link.link import Delivery, Link, LinkState
from sglang_qspec.link.private import (
    PrivateEndpoint,
    abandoned,
    remove_private,
    sweep_abandoned,
)
from sglang_qspec.link.server import LinkServer, Peer

__all__ = [
    "Delivery",
    "FakeSidecarLink",
    "Faults",
    "Keys",
    "Link",
    "LinkServer",
    "LinkState",
    "Peer",
    "PrivateEndpoint",
    "SidecarLink",
    "abandoned",
    "fingerprint",
    "remove_private",
    "sweep_abandoned",
]
