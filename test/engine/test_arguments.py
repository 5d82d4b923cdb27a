"""Settings that stop a server's start, and the error messages; some by a real command line."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qspec import config
from sglang_qspec.config import QSpecConfig, from_environment, variable
from sglang_qspec.engine.boundary import compat, installed, sglang_names
from sglang_qspec.engine.start import checks, hooks, unsupported
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.models import DemoModels
from test.preloaded.interpreter import Popen

LAUNCH = [sys.executable, "-m", "sglang.launch_server"]


def server_args(**changes: Any) -> Any:
    """Stand-in for SGLang's resolved arguments, with the values of a plain CPU server."""
    plain: dict[str, Any] = {
        "device": "cpu",
        "tp_size": 1,
        "nnodes": 1,
        "attn_cp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "attn_dp_size": 1,
        "ep_join_mode": None,
        "disaggregation_mode": "null",
        "page_size": 1,
        "attention_backend": None,
        "decode_attention_backend": None,
        "tokenizer_worker_num": 1,
        "enable_lora": None,
        "lora_paths": None,
        "is_embedding": False,
        "dllm_algorithm": None,
        "enable_pdmux": False,
        "speculative_adaptive": False,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "enable_mixed_chunk": False,
        "enable_torch_compile": False,
    }
    return SimpleNamespace(**{**plain, **changes})


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("device", "npu", "--device"),
        ("nnodes", 2, "--nnodes"),
        ("attn_cp_size", 2, "--attn-cp-size"),
        ("dcp_size", 2, "--dcp-size"),
        ("pp_size", 2, "--pp-size"),
        ("attn_dp_size", 2, "--attn-dp-size"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode"),
        ("page_size", 16, "--page-size"),
        ("tokenizer_worker_num", 4, "--tokenizer-worker-num"),
        ("is_embedding", True, "--is-embedding"),
        ("dllm_algorithm", "LowConfidence", "--dllm-algorithm"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("speculative_adaptive", True, "--speculative-adaptive"),
        ("enable_mixed_chunk", True, "--enable-mixed-chunk"),
        ("enable_torch_compile", True, "--enable-torch-compile"),
        ("speculative_accept_threshold_single", 0.9, "--speculative-accept-threshold-single"),
        ("speculative_accept_threshold_acc", 0.9, "--speculative-accept-threshold-acc"),
    ],
)
def test_an_unsupported_mode_is_named_with_its_value(name: str, value: Any, flag: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        unsupported.check(server_args(**{name: value}))
    message = str(refusal.value)
    assert message.startswith(f"{flag} is {value}, but QSPEC supports only ")
    assert message.count(": ") == 1, "the message has no reason"


def test_a_plain_server_has_no_unsupported_mode() -> None:
    unsupported.check(server_args())


def test_sglangs_rust_server_is_refused_because_it_bypasses_the_checks_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(ConfigError, match="^SGLANG_RUST_SERVER is True.* only false: .*bypasses"):
        unsupported.check(server_args())


def test_a_cpu_needs_the_variable_without_which_sglang_cannot_start_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(installed, "check", lambda _: None)
    words = "--device is 'cpu', .* only if SGLANG_USE_CPU_ENGINE is 1 in the environment: set it"
    with pytest.raises(ConfigError, match=words):
        checks.check(server_args(device="cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rejection_sampling_is_accepted_on_every_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable("acceptance"), "reject")
    monkeypatch.setattr(installed, "check", lambda _: None)
    unset = ("num_draft_tokens", "num_steps", "eagle_topk", "draft_model_path")
    args = server_args(device=device, **{f"speculative_{name}": None for name in unset})
    assert checks.check(args).acceptance == "reject"


@pytest.mark.parametrize(("setting", "refused"), [("off", False), ("on", True)])
def test_several_ranks_verify_no_drafts_in_prefills(
    setting: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable("prefill_drafts"), setting)
    monkeypatch.setattr(installed, "check", lambda _: None)
    unset = ("num_draft_tokens", "num_steps", "eagle_topk", "draft_model_path")
    args = server_args(tp_size=2, **{f"speculative_{name}": None for name in unset})
    if refused:
        with pytest.raises(ConfigError, match="prefill-drafts is 'on'.*--tp-size 2"):
            checks.check(args)
    else:
        assert checks.check(args).prefill_drafts == "off"


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"attention_backend": "qspec_cpu"}, False),
        ({"attention_backend": "torch_native"}, True),
        ({"attention_backend": "qspec_cpu", "decode_attention_backend": "torch_native"}, True),
    ],
)
def test_ragged_passes_are_refused_where_a_cpus_attention_backend_cannot_run_them(
    given: dict[str, str], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable("verify"), "ragged")
    monkeypatch.setattr(installed, "check", lambda _: None)
    unset = ("num_draft_tokens", "num_steps", "eagle_topk", "draft_model_path")
    args = server_args(**given, **{f"speculative_{name}": None for name in unset})
    if refused:
        with pytest.raises(ConfigError, match="--speculative-qspec-verify is 'ragged'"):
            checks.check(args)
    else:
        assert checks.check(args).verify == "ragged"


def test_another_release_of_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.__version__", "0.6.0")
    with pytest.raises(ConfigError, match=r"sglang is 0\.6\.0.*0\.5\.23"):
        compat.check_version()


def test_the_error_names_a_hook_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(hooks.scheduler()[0], target="sglang.srt.managers.scheduler.no_such_hook")
    monkeypatch.setattr(installed, "_tables", {"scheduler": (row,)})
    with pytest.raises(ConfigError, match="no_such_hook is not wrapped"):
        installed.check("scheduler")


def test_the_start_stops_if_the_plugin_ended_before_it_installed_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installed, "_tables", {})
    with pytest.raises(ConfigError, match="the front hooks of QSPEC are not installed"):
        installed.check("front")


def hooked() -> list[str]:
    """Names of all hooked functions."""
    return [row.target for row in (*hooks.front(), *hooks.scheduler())]


def test_every_touched_name_exists_in_the_installed_sglang() -> None:
    import pkgutil

    for name in (*hooked(), *sglang_names.CALLED):
        pkgutil.resolve_name(name)  # raises if a part of it is missing


def test_our_algorithm_has_every_method_of_sglangs_own() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_qspec.engine.start.algorithm import QSpecAlgorithm

    methods = {
        name
        for name, value in vars(SpeculativeAlgorithm).items()
        if callable(value) and not name.startswith("_")
    }
    assert methods - set(dir(QSpecAlgorithm)) <= {"from_string", "register"}


def test_the_list_of_touched_names_is_complete() -> None:
    """SGLang has each `from sglang... import NAME` of the package, or a name inside NAME."""
    import ast

    listed = {*hooked(), *sglang_names.CALLED}
    package = Path(compat.__file__).parents[1]
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    assert any(entry.startswith(name) for entry in listed), f"{path.name}: {name}"


def draft(models: DemoModels, **changes: Any) -> Any:
    plain: dict[str, Any] = {
        "speculative_draft_model_path": str(models.draft),
        "speculative_draft_model_revision": None,
        "model_path": str(models.target),
        "tokenizer_path": str(models.target),
        "trust_remote_code": False,
        "revision": None,
        "skip_tokenizer_init": False,
    }
    return server_args(**{**plain, **changes})


def test_the_demo_draft_fits_the_demo_target(models: DemoModels) -> None:
    checks.check_draft_model(draft(models), QSpecConfig())


def test_a_missing_draft_folder_is_named(models: DemoModels) -> None:
    with pytest.raises(ConfigError, match=r"--speculative-draft-model-path is './nowhere'"):
        checks.check_draft_model(
            draft(models, speculative_draft_model_path="./nowhere"), QSpecConfig()
        )


def test_a_draft_folder_without_a_model_is_named(models: DemoModels, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model can be loaded"):
        checks.check_draft_model(
            draft(models, speculative_draft_model_path=str(tmp_path)), QSpecConfig()
        )


def copy_model(source: Path, target: Path) -> Path:
    """Copy a checkpoint without its weights, which the checks before the start do not read."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("padding", [-64, 64])
def test_a_draft_whose_vocabulary_is_padded_differently_is_accepted(
    models: DemoModels, tmp_path: Path, padding: int, caplog: pytest.LogCaptureFixture
) -> None:
    import json

    other = copy_model(models.draft, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["vocab_size"] += padding
    (other / "config.json").write_text(json.dumps(config))
    with caplog.at_level("INFO"):
        checks.check_draft_model(
            draft(models, speculative_draft_model_path=str(other)), QSpecConfig()
        )
    assert f"The target has 49152 token ids and the draft model {49152 + padding}" in caplog.text


def refused_tokenizer(models: DemoModels, other: Path) -> str:
    """The refusal of a draft model for its tokenizer."""
    with pytest.raises(ConfigError, match="its tokenizer differs from the target's") as refusal:
        checks.check_draft_model(
            draft(models, speculative_draft_model_path=str(other)), QSpecConfig()
        )
    return str(refusal.value)


def test_the_refusal_of_another_tokenizer_names_the_first_token_that_differs(
    models: DemoModels, tmp_path: Path
) -> None:
    import json

    other = copy_model(models.draft, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = {token_id: token for token, token_id in vocabulary.items()}
    for token_id in (1000, 2000):
        vocabulary[names[token_id]] = token_id + 1
        vocabulary[names[token_id + 1]] = token_id
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    wrong = f"token id 1000 is {names[1001]!r} there and {names[1000]!r} in the target's tokenizer"
    assert wrong in refused_tokenizer(models, other)


def test_a_token_that_only_one_tokenizer_has_is_a_difference(
    models: DemoModels, tmp_path: Path
) -> None:
    import json

    other = copy_model(models.draft, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "content": "<more>"})
    tokenizer["added_tokens"][-1]["id"] = 49152
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "token id 49152 is '<more>' there and no token in" in refused_tokenizer(models, other)


def test_an_endpoint_and_a_draft_model_exclude_each_other(models: DemoModels) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        checks.check_draft_model(draft(models), QSpecConfig(endpoint="ipc:///tmp/x/y"))


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SGLANG_QSPEC_COMPLETIONS": "0"}, "SGLANG_QSPEC_COMPLETIONS is '0'.*from 1 to 64"),
        ({"SGLANG_QSPEC_COMPLETION": "4"}, "SGLANG_QSPEC_COMPLETION is not a setting"),
        ({"SGLANG_QSPEC_TEMPERATURE": "hot"}, "'hot', but must be a number from 0 to 2"),
        ({"SGLANG_QSPEC_CORES": "1-0"}, "a list of CPU numbers"),
        ({"SGLANG_QSPEC_ENDPOINT": "localhost:1"}, "ipc://PATH or tcp://HOST:PORT"),
        ({"SGLANG_QSPEC_ENDPOINT": "tcp://localhost:1"}, "--speculative-qspec-key-file"),
        ({"SGLANG_QSPEC_MAX_TOTAL_TOKENS": "1024"}, "max-request-tokens"),
    ],
)
def test_a_bad_variable_is_named_with_its_value_and_what_is_allowed(
    environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        from_environment(environment)


def test_the_help_of_the_server_shows_every_setting() -> None:
    from sglang_qspec import config

    shown = subprocess.run([*LAUNCH, "--help"], capture_output=True, text=True, check=True).stdout
    for field in config.fields():
        assert config.flag(field.name) in shown


def errors_of(stderr: str) -> list[str]:
    """The error lines of a failed start. Fails if there is a traceback."""
    assert "Traceback" not in stderr
    return [line for line in stderr.splitlines() if "error:" in line]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--speculative-qspec-completions", "99"], "must be a whole number from 1 to 64"),
        (["--speculative-num-draft-tokens", "1"], "--speculative-num-draft-tokens is 1"),
        pytest.param(
            ["--speculative-draft-model-path", "/nowhere"],
            "there is no such folder",
            marks=pytest.mark.thorough,
        ),
        pytest.param(["--pp-size", "2"], "--pp-size is 2", marks=pytest.mark.thorough),
    ],
)
def test_a_bad_flag_stops_the_start_with_one_sentence(
    models: DemoModels, monkeypatch: pytest.MonkeyPatch, extra: list[str], words: str
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Popen)
    command = [*LAUNCH, "--model-path", str(models.target), "--device", "cpu"]
    command += ["--speculative-algorithm", "QSPEC", *extra]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert [words in line for line in errors_of(ended.stderr)] == [True]


def test_a_setting_without_the_algorithm_stops_the_start(models: DemoModels) -> None:
    command = [*LAUNCH, "--model-path", str(models.target), "--speculative-qspec-cores", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ["it must be QSPEC" in line for line in errors_of(ended.stderr)] == [True]


def test_a_target_with_multimodal_positions_verifies_one_width(
    models: DemoModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang computes these positions for requests with equal numbers of tokens."""
    from sglang.srt.configs.model_config import ModelConfig

    content = json.loads((models.target / "config.json").read_text())
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps({**content, "rope_parameters": rope}))
    args = server_args(model_path=str(tmp_path))
    monkeypatch.setenv(variable("verify"), "auto")
    checks.check_target(args, ModelConfig(str(models.target)), QSpecConfig())
    assert config.from_environment().verify == "auto"
    target = ModelConfig(str(tmp_path))
    checks.check_target(args, target, QSpecConfig())
    assert config.from_environment().verify == "tree"
    with pytest.raises(ConfigError, match="is 'ragged', but .* has multimodal rotary positions"):
        checks.check_target(args, target, QSpecConfig(verify="ragged"))
