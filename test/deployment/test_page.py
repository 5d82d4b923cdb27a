"""The figures and commands of docs/deployment.md match the arithmetic and the programs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.cpu.install import install_kernels
from test.deployment.manifests import FOLDER, read_router, read_server, read_sidecar
from test.deployment.node import DRAFTERS, MODELS, drafter_of, kv_tokens, pass_ms

PAGE = (FOLDER.parent / "deployment.md").read_text()
READERS = {
    "python -m sglang.launch_server ": read_server,
    "qspec sidecar ": read_sidecar,
    "python -m sglang_router.launch_router ": read_router,
}


def table(heading: str) -> list[list[str]]:
    """The cells of the rows of a table."""
    lines = PAGE.splitlines()
    rows = []
    for line in lines[lines.index(next(line for line in lines if line.startswith(heading))) + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def commands() -> Iterator[str]:
    """The indented commands of the page, each in one line, without variables before them."""
    lines = [line[4:] for line in PAGE.splitlines() if line.startswith("    ")]
    for command in "\n".join(lines).replace("\\\n", " ").splitlines():
        yield re.sub(r"^CUDA_VISIBLE_DEVICES=\S+ ", "", command)


def test_the_table_of_memory_matches_the_arithmetic() -> None:
    rows = table("| target | ranks |")
    assert len(rows) == 9
    for target, ranks, gigabytes, slots in rows:
        model = MODELS[target]
        assert gigabytes == f"{model.weight_bytes() / int(ranks) / 1e9:.1f}"
        found = kv_tokens(model, int(ranks))
        assert slots == (f"{found / 1e3:.0f}" if found > 0 else "does not fit")


def test_the_table_of_models_has_the_figures_of_the_arithmetic() -> None:
    models = {
        "Llama 3.1 8B": [MODELS["8B, bfloat16"], DRAFTERS["70B"]],
        "Llama 3.1 70B": [MODELS["70B, bfloat16"], MODELS["70B, FP8"]],
        "Qwen3 235B-A22B": [MODELS["235B MoE, bfloat16"], MODELS["235B MoE, FP8"]],
        "Llama 3.2 1B": [DRAFTERS["8B"]],
        "Qwen3 1.7B": [DRAFTERS["235B MoE"]],
    }
    rows = {name: cells for name, *cells in table("| model | parameters")}
    assert rows.keys() == models.keys()
    for name, same in models.items():
        for model in same:
            shape = [model.layers, model.kv_heads, model.head_dim]
            assert rows[name] == [f"{model.parameters / 1e9:g}", *map(str, shape)]
    moe = models["Qwen3 235B-A22B"][0]
    text = " ".join(PAGE.split())
    assert f"{moe.experts} experts in each layer, with {moe.expert_parameters / 1e6:.1f} m" in text
    active = moe.read_bytes(1) / moe.value_bytes
    assert f"{moe.chosen} experts of each layer, and {active / 1e9:.0f} billion" in text


def predicted(
    capsys: pytest.CaptureFixture[str], alpha: str, requests: str, times: list[str]
) -> dict[str, float]:
    """Tokens/s of each pipeline for one server, as `qspec theory` prints them."""
    plain, verify, draft = times
    given = ["--plain-ms", plain, "--verify-ms", verify, "--draft-ms", draft]
    assert main(["theory", "--k", "4", "--alpha", alpha, "--in-flight", requests, *given]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    return {line[0]: float(line[3]) for line in printed}


def test_the_table_of_throughput_matches_the_theory(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table("| target | servers × ranks |")
    assert len(rows) == 12
    for target, split, sidecars, requests, *times, none, slow, fast in rows:
        model = MODELS[target]
        servers, ranks = map(int, split.split(" × "))
        total = servers * int(requests)
        assert total == (56 if target.startswith("8B") else 48)
        assert float(times[0]) == pytest.approx(pass_ms(model, ranks, int(requests), 1), abs=0.051)
        if sidecars == "0":
            rate = total / float(times[0]) * 1e3
            assert float(none) == pytest.approx(rate, abs=51)
            continue
        assert float(times[1]) == pytest.approx(pass_ms(model, ranks, int(requests), 5), abs=0.051)
        drafting = 4 * pass_ms(drafter_of(target), 1, total // int(sidecars), 1)
        assert float(times[2]) == pytest.approx(drafting, abs=0.051)
        for alpha, cell in (("0.6", slow), ("0.8", fast)):
            rates = predicted(capsys, alpha, requests, times)
            best = max(rates["sequential"], rates["ahead"])
            assert float(none) == pytest.approx(servers * rates["none"], abs=51)
            assert float(cell) == pytest.approx(servers * best, abs=51)


def test_the_page_states_what_a_pass_of_the_moe_target_costs() -> None:
    model = MODELS["235B MoE, FP8"]
    text = " ".join(PAGE.split())
    for requests in (1, 8, 48):
        plain, wide = (f"{pass_ms(model, 4, requests, width):.1f}" for width in (1, 5))
        assert plain in text
        assert f"{wide} ms" in text
    assert f"reads {model.read_bytes(1) / 1e9:.0f} GB" in text
    assert f"reads {model.read_bytes(5) / 1e9:.0f} GB" in text


def test_the_programs_take_the_commands_of_the_page() -> None:
    install_kernels()
    taken = dict.fromkeys(READERS, 0)
    for command in commands():
        for start, read in READERS.items():
            if command.startswith(start):
                read(shlex.split(command.removeprefix(start)))
                taken[start] += 1
    assert list(taken.values()) == [3, 2, 1]


def test_the_page_names_the_releases_of_the_image() -> None:
    for router in ("sglang-router", "smg"):
        locked = (FOLDER.parents[1] / "requirements" / f"{router}.txt").read_text().split()[0]
        assert locked.startswith(f"{router}==")
        assert f"| {locked.replace('==', ' ')} |" in PAGE
    assert "`--build-arg ROUTER=smg`" in PAGE
    assert "sglang-router==" + PAGE.split("| sglang-router ")[1].split()[0] in PAGE
