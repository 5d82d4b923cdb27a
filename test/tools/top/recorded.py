"""Snapshots that a server with the demo models sent, with 2 running requests at once.

`recorded.json` has the field `qspec` of /server_info, without `positions` and without the settings
that `qspec top` does not read. The backlog, the level of overload, the seconds of all passes of the
sidecar and the trials of drafts were added to it by hand.
"""

import json
from pathlib import Path

from sglang_qspec.tools.top.interval import Snapshot

_SNAPSHOTS = {
    name: Snapshot(taken["time"], taken["state"])
    for name, taken in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
}
IDLE = _SNAPSHOTS["idle"]
LOADED = (_SNAPSHOTS["loaded"], _SNAPSHOTS["loaded, 2 s later"])
LOST = (_SNAPSHOTS["sidecar killed"], _SNAPSHOTS["sidecar killed, 4 s later"])


def later(snapshot: Snapshot, time: float | None = None, **changed: object) -> Snapshot:
    """The same state two seconds later, or two seconds after `time`, with `changed` fields."""
    since = snapshot.time if time is None else time
    return Snapshot(since + 2.0, {**snapshot.state, **changed})
