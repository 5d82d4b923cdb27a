"""Copies the repository, and runs commands in the copy."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """The standard output of a command that must succeed."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def copy_tracked(folder: Path) -> None:
    """Copy the tracked files to `folder`, because a build writes into its source."""
    for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
