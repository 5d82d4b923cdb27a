"""A cache of checkpoints that are built once per machine.

A folder in the cache is complete or absent: it is built under a temporary name and then renamed.
Its manifest has the size and SHA-256 of every file. If several processes need the same folder, one
builds it and the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sglang_qspec.config import ENV_PREFIX

logger = logging.getLogger(__name__)

MANIFEST = "qspec-manifest.json"

Recipe = Mapping[str, str | int | None]
"""Everything that determines the content of a folder; each recipe has its own folder."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder: `$SGLANG_QSPEC_CACHE`, or a folder in the user's cache."""
    given = environ.get(ENV_PREFIX + "CACHE")
    if given:
        return Path(given).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang-qspec"


def cached(name: str, recipe: Recipe, build: Callable[[Path], None]) -> Path:
    """Return the cache's folder for `recipe`; `build` builds it if it is absent or damaged.

    `build` fills an empty folder. If it raises, the exception propagates and no folder remains.
    """
    text = json.dumps(dict(recipe), sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:10]
    return build_folder(cache_folder() / f"{name}-{key}", build)


def build_folder(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`; `build` builds it unless it exists and matches its manifest."""
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{folder.name}.lock"):
        if is_complete(folder):  # another process built it while this one waited
            return folder
        prefix = f".{folder.name}.tmp-"
        for abandoned in folder.parent.glob(f"{prefix}*"):  # its process is dead: the lock was free
            shutil.rmtree(abandoned, ignore_errors=True)
        draft = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            content = draft / "content"
            content.mkdir()
            build(content)
            _write_manifest(content)
            if folder.exists():
                logger.warning("%s does not match its manifest, so it was built again", folder)
                folder.rename(draft / "damaged")
            content.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def is_complete(folder: Path) -> bool:
    """Whether the folder has a manifest and every listed file has the recorded size and hash."""
    listed = _listed(folder)
    try:
        return bool(listed) and all(
            (folder / name).stat().st_size == size and sha256(folder / name) == digest
            for name, (size, digest) in listed.items()
        )
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listed(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file in the manifest; empty if it is absent or damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, TypeError, AttributeError, KeyError):  # not JSON, or not this structure
        return {}


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in files
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
