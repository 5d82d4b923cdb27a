"""SGLang's own test kits (`sglang.test.kits`, in its wheel) on a server with QSPEC.

A model of 135 M parameters cannot pass all tests of the kits. So a test that fails with QSPEC runs
again without it, and is skipped if it fails there too. Kits that download data sets, use GPU timers
or need models of another kind are left out.
"""

import importlib
import signal
import unittest
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from benchmark.harness.server import ServerError
from sglang_qspec.tools.models import DemoModels
from test.preloaded.server import Server

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(1500)]

TEST_SECONDS = 600
ARGUMENTS = [
    *("--device", "cpu", "--dtype", "float32", "--max-running-requests", "16"),
    *("--max-total-tokens", "24576", "--log-level", "warning", "--enable-return-hidden-states"),
    "--enable-streaming-session",
]
ATTRIBUTES: dict[str, Any] = {
    "api_key": "none",
    # The server must speculate. How fast it is, the benchmarks measure.
    "acc_length_thres": 1.0,
    "batch_accept_len_thres": 1.0,
    "accept_length_thres": 1.0,
    "bs_1_speed_thres": 0.0,
    "bs_1_speed_attempts": 1,
    # A core serves tens of tokens a second; the kits expect a GPU's thousands.
    "abort_all_num_requests": 8,
    "abort_all_max_new_tokens": 4000,
    "pause_num_requests": 8,
    "pause_max_new_tokens": 128,
    "pause_duration": 2,
}
KITS = {
    "basic_api_contract_kit": ["BasicAPIContractMixin"],
    "basic_decode_correctness_kit": ["BasicDecodeCorrectnessMixin"],
    "basic_scheduler_stress_kit": ["BasicSchedulerStressMixin"],
    "json_constrained_kit": ["JSONConstrainedMixin"],
    "regex_constrained_kit": ["RegexConstrainedMixin"],
    "ebnf_constrained_kit": ["EBNFConstrainedMixin"],
    "json_mode_kit": ["JSONModeMixin"],
    "matched_stop_kit": ["MatchedStopMixin"],
    "anthropic_messages_kit": ["AnthropicMessagesMixin"],
    "pause_generation_kit": ["PauseResumeInPlaceMixin"],
    "abort_timeout_kit": ["AbortAllMixin"],
    "streaming_session_kit": ["StreamingSessionKitMixin"],
    "spec_decoding_kit": ["SpecDecodingMixin"],
    "spec_server_kits": [
        *("SpecCorrectnessKit", "SpecLogprobKit", "SpecPenaltyKit", "SpecFeatureKit"),
        *("SpecHiddenStatesKit", "SpecGrammarKit"),
    ],
}


def cases() -> list[Any]:
    """The parameters of `test_kit` for each test of each kit."""
    import sglang_qspec  # noqa: F401, I001  first: it installs the CPU stand-ins
    from sglang.test.kits import radix_cache_server_kit

    # 400 prompts with answers of up to 256 tokens would take an hour here.
    radix_cache_server_kit.gen_radix_tree.__defaults__ = (40, 64)
    found = []
    for module, kits in KITS.items():
        for kit in kits:
            mixin = getattr(importlib.import_module(f"sglang.test.kits.{module}"), kit)
            names = [name for name in dir(mixin) if name.startswith("test_")]
            found += [pytest.param(mixin, name, id=f"{kit}-{name}") for name in names]
    return found


@dataclass
class Servers:
    """A server with QSPEC and one without. Each starts at first use; only one runs at a time."""

    models: DemoModels
    running: dict[bool, Server] = field(default_factory=dict)

    def of(self, qspec: bool) -> Server:
        server = self.running.get(qspec)
        if server is None or server.exit_code() is not None:
            server = self.running[qspec] = Server(self.models.target, self._arguments(qspec))
            server.start()
        for other in self.running.values():
            if other is not server:
                other.pause()
        server.resume()
        return server

    def _arguments(self, qspec: bool) -> list[str]:
        if not qspec:
            return ARGUMENTS
        draft = str(self.models.draft)
        algorithm = ["--speculative-algorithm", "QSPEC", "--speculative-draft-model-path", draft]
        return [*ARGUMENTS, *algorithm, "--speculative-qspec-mem-fraction", "0.05"]


@pytest.fixture(scope="module")
def servers(models: DemoModels) -> Iterator[Servers]:
    both = Servers(models)
    try:
        yield both
    finally:
        for server in both.running.values():
            server.stop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Import SGLang's kits only if their tests will run, since that takes half a minute."""
    if "mixin" in metafunc.fixturenames:
        found = cases() if metafunc.config.getoption("--thorough") else []
        metafunc.parametrize(("mixin", "name"), found)


def test_kit(servers: Servers, mixin: type, name: str) -> None:
    failure = run(servers, mixin, name, qspec=True)
    if failure is None:
        return
    if run(servers, mixin, name, qspec=False) is not None:
        pytest.skip("fails without QSPEC too: " + last_line(failure))
    pytest.fail("passes without QSPEC:\n" + failure)


def run(servers: Servers, mixin: type, name: str, *, qspec: bool) -> str | None:
    """Run one test of a kit on one of the servers. Returns the traceback if it fails."""
    server = servers.of(qspec)
    outcome = unittest.TestResult()
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TEST_SECONDS)
    try:
        type(mixin.__name__, (mixin, Host), attributes(servers.models, server))(name).run(outcome)
    finally:
        signal.alarm(0)
    if server.exit_code(1.0) is not None:
        return "the server has ended:\n" + server.log[-3000:]
    server.post("/abort_request", {"rid": "", "abort_all": True})
    return next((text for _, text in (*outcome.errors, *outcome.failures)), None)


def give_up(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the test takes longer than {TEST_SECONDS} s")


def last_line(traceback: str) -> str:
    return traceback.strip().splitlines()[-1][:160]


def attributes(models: DemoModels, server: Server) -> dict[str, Any]:
    """The class attributes that the kits read."""
    import openai
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return {
        **ATTRIBUTES,
        "base_url": server.url,
        "model": str(models.target),
        "served_model_name": str(models.target),
        "process": server._process,
        "client": openai.Client(api_key="none", base_url=server.url + "/v1"),
        "tokenizer": get_tokenizer(str(models.target)),
        "server": server,
    }


class Host(unittest.TestCase):
    """The methods of SGLang's EAGLE test fixture that `spec_server_kits` call."""

    server: Server

    def send_request(self) -> None:
        self._generate("Who are you?", {"temperature": 0, "max_new_tokens": 64})

    def send_requests_abort(self) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 1024, "ignore_eos": True}
        for text in ("Who are you?", "Where are you from?"):
            with pytest.raises((OSError, ServerError)):
                self.server.post(
                    "/generate", {"text": text, "sampling_params": sampling}, timeout=1.0
                )

    def run_decode(self, sampling: dict[str, Any]) -> None:
        given = {"max_new_tokens": 48, "temperature": 0.7, **sampling}
        self._generate("Write a travel blog post to Hawaii.", given, logprob_start_len=0)

    def _generate(self, text: str, sampling: dict[str, Any], **asked: Any) -> None:
        logprobs = {"return_logprob": True, "top_logprobs_num": 5, **asked} if asked else {}
        self.server.post("/generate", {"text": text, "sampling_params": sampling, **logprobs})
