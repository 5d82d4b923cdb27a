"""A sidecar at a low priority does not hold the file of the log while it waits for a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, os, sys, threading
from sglang_qspec.sidecar.hardware import lower_priority

class Priorities(logging.Handler):
    def emit(self, record):
        thread = threading.get_native_id()
        own = os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)
        print(record.getMessage(), own == normal, thread == os.getpid(), flush=True)

normal = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
logging.basicConfig(handlers=[Priorities()], level=logging.INFO)
lower_priority(idle=sys.argv[1] == "idle")
lowered = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
for number in range(3):
    logging.info("line %d", number)
logging.shutdown()
print("lowered", lowered != normal, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("priority", ["idle", "lowest"])
def test_a_thread_of_normal_priority_writes_the_log_to_its_end(priority: str) -> None:
    command = [sys.executable, "-c", PROGRAM, priority]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [f"line {number} True False" for number in range(3)]
    assert printed.splitlines() == [*lines, "lowered True"]
