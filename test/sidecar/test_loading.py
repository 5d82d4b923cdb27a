"""Loading a draft model: errors of SGLang, memory, and the process's exit code after an error."""

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

from sglang_qspec.errors import ConfigError, DraftModelError, QSpecError
from sglang_qspec.sidecar import __main__ as program
from sglang_qspec.sidecar import hardware, loading, service
from sglang_qspec.sidecar.child_process import UNUSABLE
from sglang_qspec.sidecar.loading import DraftModelOptions, LoadError
from sglang_qspec.sidecar.memory import GIB, RUNTIME_BYTES

OPTIONS = DraftModelOptions("/models/draft", device="cpu")
LAYERS = torch.nn.Linear(1000, 1000, bias=False)
"""A model with 4 MB of weights."""


@pytest.mark.parametrize(
    ("error", "words", "final"),
    [
        (
            Exception("Capture cuda graph failed: Invalid thread config\nhint"),
            "thread config",
            True,
        ),
        (ValueError("no such method"), "no such method", True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory", False),
        (OSError("the hub does not answer"), "the hub does not answer", False),
        (DraftModelError("too little"), "too little", True),
        (AssertionError(), "AssertionError", True),
    ],
)
def test_any_error_of_sglang_becomes_one_line_that_names_the_draft_model(
    error: Exception, words: str, final: bool
) -> None:
    message = f"^draft model /models/draft: .*{words}"
    with pytest.raises(LoadError, match=message) as caught, loading.as_load_error(OPTIONS):
        raise error
    assert "\n" not in str(caught.value)
    assert caught.value.is_final is final
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LoadError("no kernel"), UNUSABLE),
        (LoadError("out of memory", is_final=False), 1),
        (ConfigError("a bad shape"), UNUSABLE),
        (DraftModelError("5 passes failed"), 1),
    ],
)
def test_the_exit_code_says_whether_a_new_start_would_help(
    monkeypatch: pytest.MonkeyPatch, error: QSpecError, code: int
) -> None:
    def run(*_: Any, **_options: Any) -> int:
        raise error

    monkeypatch.setattr(service, "run", run)
    assert program.main(["--model-path=org/m", "--endpoint=ipc:///nowhere"]) == code


def test_on_a_cpu_kv_gets_what_the_weights_leave_of_the_fraction_of_all_memory() -> None:
    original = KVCacheConfigurator._profile_available_bytes
    options = DraftModelOptions("m", device="cpu", mem_fraction=0.25)
    given = int(psutil.virtual_memory().total * 0.25)
    for loaded, weights in ((0, 4_000_000), (9_000_000, 9_000_000)):
        with loading.fixed_kv(options, LAYERS, loaded, 4096):
            left = KVCacheConfigurator._profile_available_bytes(None, 1)
        assert left == given - weights
    assert KVCacheConfigurator._profile_available_bytes is original


def test_kv_leaves_room_for_the_copy_of_the_lm_head_that_the_first_pass_packs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(10, 100, bias=False)
    for is_packable, is_quantized, copy in ((True, False, 4000), (False, True, 1000)):
        monkeypatch.setattr(loading, "can_pack", lambda _, packable=is_packable: packable)
        assert loading.head_copy_bytes(model, quantized=is_quantized) == copy
    assert loading.head_copy_bytes(model, quantized=False) == 0
    assert loading.head_copy_bytes(LAYERS, quantized=True) == 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU of 80 GiB on which this process has reserved 6 GiB, and others all but `free`."""
    memory = {"free": 10 * GIB}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (memory["free"], 80 * GIB))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 6 * GIB)
    return memory


def test_on_a_gpu_kv_does_not_depend_on_what_other_processes_have_taken(
    gpu: dict[str, int],
) -> None:
    options = DraftModelOptions("m", device="cuda", mem_fraction=0.15)
    for free in (10 * GIB, 70 * GIB):
        gpu["free"] = free
        with loading.fixed_kv(options, LAYERS, 0, 4096):
            assert KVCacheConfigurator._profile_available_bytes(None, 1) == (
                int(80 * GIB * 0.15) - 6 * GIB - RUNTIME_BYTES - 1025 * 4096 * 4
            )


@pytest.mark.usefixtures("gpu")
def test_a_gpu_has_more_slots_and_rows_by_default_than_a_cpu() -> None:
    for device, slots, rows in (("cpu", 64, 256), ("cuda", 256, 1024)):
        options = DraftModelOptions("m", device=device)
        assert (loading.slots(options), loading.kv_rows(options)) == (slots, rows)
    given = DraftModelOptions("m", device="cuda", batch=100)
    assert (loading.slots(given), loading.kv_rows(given)) == (100, 400)


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_without_a_fraction_sglang_takes_what_is_free() -> None:
    original = KVCacheConfigurator._profile_available_bytes
    with loading.fixed_kv(DraftModelOptions("m", device="cuda"), LAYERS, 0, 4096):
        assert KVCacheConfigurator._profile_available_bytes is original


@pytest.mark.usefixtures("gpu")
def test_a_fraction_too_small_for_the_weights_stops_the_load() -> None:
    options = DraftModelOptions("m", device="cuda", mem_fraction=0.05)
    with pytest.raises(DraftModelError, match=r"6\.0 GiB of weights"):
        loading.fixed_kv(options, LAYERS, 0, 4096).__enter__()


def test_a_sidecar_of_a_server_lets_the_servers_kernels_go_first_under_mps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_MPS_CLIENT_PRIORITY", raising=False)
    hardware.yield_gpu()
    assert os.environ["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    monkeypatch.setenv("CUDA_MPS_CLIENT_PRIORITY", "0")
    hardware.yield_gpu()
    assert os.environ["CUDA_MPS_CLIENT_PRIORITY"] == "0"


def test_a_sidecar_knows_the_parent_of_its_fork_server() -> None:
    above = [each.pid for each in psutil.Process().parents()]
    assert all(map(service._has_ancestor, above[:2]))
    assert not any(map(service._has_ancestor, [os.getpid(), *above[2:]]))


def test_quantized_layers_that_no_kernel_takes_are_refused_before_anything_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, '
        '"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": true}}'
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(loading, "server_args", lambda _: pytest.fail("SGLang was asked"))
    with pytest.raises(ConfigError, match="do not run on CUDA"):
        loading.load(DraftModelOptions(str(tmp_path), device="cuda"))
