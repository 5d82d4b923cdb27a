"""Every stream equals the whole answer, however the answer is divided into steps.

The tests run SGLang's own way from the accepted tokens to the text: `Req`, its output streamer and
its `DetokenizerManager`, with QSPEC's hooks.
"""

import inspect
import re
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.detokenizer_manager import DetokenizerManager, LimitedCapacityDict
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components import output_streamer
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from sglang_qspec.engine import speculation
from sglang_qspec.engine.frontend import byte_tokens, detokenizer
from sglang_qspec.engine.scheduler import endings, last_output, stop_strings
from sglang_qspec.tools.models import DemoModels
from test.heads.tiny import byte_tokenizer

TEXTS = (
    "日本語テキスト、例えば「猫」と「犬」です。",
    "世界안녕 세계 안녕世界",
    "我喜欢🐱和🐶，你呢？\n\n你好😀你好😀",
    "ภาษาไทยไม่มีช่องว่าง ระหว่างคำ",
    "اللُّغَة العَرَبِيَّة من اليمين إلى اليسار",
    "हिन्दी क्षत्रिय ज्ञान श्री ॐ",
    "👩‍👩‍👧‍👦 🇯🇵🇫🇷 👍🏽 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ❤️‍🔥",
    "e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343 naïve café €5",
    "plain text, then 中 and \ufffd itself, x = '日'",
)


def byte_fallback() -> Any:
    """A tokenizer of SentencePiece's kind, with byte tokens for letters outside its vocabulary."""
    letters = sorted({*"▁abcdefghijklmnopqrstuvwxyz0123456789=',.", *"日本語中です。안"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")
    fast.additional_stop_token_ids = None
    return fast


@pytest.fixture(scope="module", params=["bytes for letters", "byte tokens"])
def answering(request: pytest.FixtureRequest, models: DemoModels) -> Any:
    if request.param == "byte tokens":
        return Answering(byte_fallback)
    return Answering(lambda: get_tokenizer(str(models.target)))


@pytest.fixture(scope="module", autouse=True)
def server() -> Any:
    """What the processes of a server with QSPEC publish."""
    with pytest.MonkeyPatch.context() as patch:
        settings_of = SimpleNamespace(stream_interval=1, weight_version="1")
        quiet = SimpleNamespace(enable_request_time_stats_logging=False)
        patch.setattr(output_streamer, "get_serving", lambda: settings_of)
        patch.setattr(output_streamer, "get_observability", lambda: quiet)
        ranks = SimpleNamespace(dp_rank=0, attn_tp_rank=0)
        patch.setattr(output_streamer, "get_parallel", lambda: ranks)
        patch.setattr(
            detokenizer, "get_spec", lambda: SimpleNamespace(speculative_algorithm="QSPEC")
        )
        patch.setattr(speculation, "active", lambda: SimpleNamespace(end=lambda *_: None))
        yield settings_of


class Answering:
    """The output side of a server: scheduler, detokenizer, and the text that a client gets."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self.tokenizer = load()
        self.prompt = self.ids("a")
        self.payloads: list[Any] = []
        streamer = last_output.output_streamer_class(output_streamer.SchedulerOutputStreamer, None)
        self.streamer = streamer(
            send_to_detokenizer=SimpleNamespace(send_output=self.payloads.append),
            tree_cache=None,
            server_args=None,
            is_generation=True,
            spec_algorithm=SpeculativeAlgorithm.NGRAM,
            disaggregation_mode=DisaggregationMode.NULL,
            enable_hicache_storage=lambda: False,
        )
        byte_tokens.repair(self.tokenizer)  # as `stop_strings.repair_scheduler` does
        self.manager = manager = object.__new__(DetokenizerManager)
        manager.tokenizer = load()
        manager.vocab_size = len(manager.tokenizer)
        manager.decode_status = LimitedCapacityDict(capacity=64)
        manager.disable_tokenizer_batch_decode = False
        manager.is_tool_call_parser_gpt_oss = False
        manager.tool_close_token_ids = frozenset()
        detokenizer.repair_detokenizer(None, manager)

    def answer(
        self,
        ids: Sequence[int],
        steps: Sequence[int],
        *,
        prompt: Sequence[int] = (),
        stream: bool = True,
        **sampling: Any,
    ) -> tuple[str, list[int]]:
        """Text and ids of an answer with the tokens `ids`, which come in runs of these lengths."""
        params = SamplingParams(max_new_tokens=len(ids), **sampling)
        params.normalize(self.tokenizer)
        stop_strings.widen(params)
        prompt_ids, size = array("q", prompt or self.prompt), len(self.tokenizer)
        req = Req("r", "", prompt_ids, params, vocab_size=size, stream=stream)
        req.tokenizer = self.tokenizer
        runs, place = [], 0
        for step in (*steps, len(ids)):
            runs.append(ids[place : place + step])
            place += step
        for run in filter(None, runs):
            if req.finished():
                break
            req.output_ids.extend(run)
            update = inspect.unwrap(Req.update_finish_state)
            endings.update_finish_state(update, req, len(run))
            self.streamer.stream_output([req], False)
        text, output_ids = "", []
        decode = inspect.unwrap(DetokenizerManager._decode_batch_token_id_output)
        for payload in self.payloads:
            (piece,) = detokenizer.decode_step(decode, self.manager, payload)
            text += piece
            output_ids += payload.output_ids[0]
        self.payloads.clear()
        assert not self.manager.decode_status
        return text, output_ids

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def steps() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 9), max_size=40)


@given(data=st.data())
@settings(max_examples=150)
def test_a_stream_equals_the_whole_answer(answering: Answering, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(TEXTS) | st.text(max_size=12))
    ids = answering.ids(text)
    if not ids:
        return
    cut = ids[: data.draw(st.integers(1, len(ids)))]  # an answer may end amid a character
    interval: dict[str, Any] = {"stream_interval": data.draw(st.integers(1, 5))}
    whole = answering.answer(cut, [len(cut)], stream=False)
    assert answering.answer(cut, data.draw(steps()), **interval) == whole
    assert answering.answer(cut, data.draw(steps()), stream=False) == whole
    if cut == ids:
        prompt, decode = answering.prompt, answering.tokenizer.decode
        assert whole == (decode(prompt + ids).removeprefix(decode(prompt)), ids)


@given(data=st.data())
@settings(max_examples=150)
def test_a_stream_of_any_tokens_equals_the_whole_answer(
    answering: Answering, data: st.DataObject
) -> None:
    """The tokens need not be text: bytes that are no characters, special tokens."""
    size = len(answering.tokenizer)
    special = [0, 2]
    tokens = st.integers(0, size - 1) | st.integers(0, 258) | st.sampled_from(special)
    ids = data.draw(st.lists(tokens, min_size=1, max_size=24))
    prompt = data.draw(st.lists(tokens, min_size=1, max_size=8))
    asked: dict[str, Any] = {
        "prompt": prompt,
        "ignore_eos": True,
        "skip_special_tokens": data.draw(st.booleans()),
    }
    interval: dict[str, Any] = {"stream_interval": data.draw(st.integers(1, 5))}
    whole = answering.answer(ids, [len(ids)], stream=False, **asked)
    assert answering.answer(ids, data.draw(steps()), **asked, **interval) == whole
    assert answering.answer(ids, [1] * len(ids), **asked) == whole


@given(data=st.data())
@settings(max_examples=200)
def test_a_stream_shows_no_part_of_a_stop_string(answering: Answering, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(TEXTS))
    ids = answering.ids(text)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text) - 1))
        # Some tokenizers hide a space at the beginning of an output from the search.
        stops.append(text[start : start + data.draw(st.integers(1, 4))].lstrip(" ") or "x")
    asked: dict[str, Any] = {"no_stop_trim": data.draw(st.booleans())}
    asked["stop"], asked["stop_regex"] = stops[1:], [re.escape(stops[0])]
    if data.draw(st.booleans()):
        asked["stop_token_ids"] = [data.draw(st.sampled_from(ids))]
    interval: dict[str, Any] = {"stream_interval": data.draw(st.integers(1, 5))}
    # Without drafts, and without parts that SGLang sends before the end.
    whole = answering.answer(ids, [1] * len(ids), stream=False, **asked)
    assert answering.answer(ids, data.draw(steps()), **asked, **interval) == whole
    assert answering.answer(ids, data.draw(steps()), stream=False, **asked) == whole


def test_a_stop_string_counts_in_whatever_tokens_it_comes(answering: Answering) -> None:
    ids = [token for letter in "one woman, two" for token in answering.ids(letter)[-1:]]
    text, output_ids = answering.answer(ids, [4, 4], stop=["woman"])
    assert text.replace(" ", "") == "one"
    assert output_ids == ids[: len("one woman")]


def test_a_tokenizer_without_a_token_for_the_unknown_needs_no_repair() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.convert_tokens_to_ids(["<0x00>"]) == [None]
    before = tokenizer.decode
    byte_tokens.repair(tokenizer)
    assert tokenizer.decode == before
