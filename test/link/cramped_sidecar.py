"""A sidecar without a model that may open only a few file descriptors.

    python -m test.link.cramped_sidecar ENDPOINT DESCRIPTORS PAUSED [KEY_FILE]

It writes the endpoint that it serves to its standard output. If PAUSED is 1, it reads its socket
only after a line on its standard input, as after a long pass of a draft model. It ends when its
standard input is closed.
"""

from __future__ import annotations

import resource
import select
import sys

from sglang_qspec.link import LinkServer, keys
from sglang_qspec.messages import PROTOCOL, Heartbeat, Welcome
from test.link.wire import FINGERPRINT, VOCAB_SIZE


def main(endpoint: str, descriptors: int, paused: bool, key_file: str | None) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    server = LinkServer(
        endpoint,
        Welcome(PROTOCOL, "tiny draft", VOCAB_SIZE, context_len=64),
        FINGERPRINT,
        lambda: Heartbeat(requests=0, rows=0, drafted_tokens=0, dropped_messages=0),
        keys.load(key_file) if key_file is not None else None,
    )
    sys.stdout.write(server.endpoint + "\n")
    sys.stdout.flush()
    if paused:
        sys.stdin.readline()
    while not select.select([sys.stdin], [], [], 0)[0]:
        server.receive(500)
    server.close()


if __name__ == "__main__":
    key_file = sys.argv[4] if len(sys.argv) > 4 else None
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1", key_file)
