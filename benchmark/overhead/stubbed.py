"""SGLang's overlap scheduler in this process, with a target that takes no time on a fake device.

The host then does all the work of a server's scheduler but the passes themselves. The target is a
permutation of the token ids with one cycle, so no output repeats a token, and lookups find nothing.
The fake device completes a pass when the host waits for it, and counts these waits.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count
from typing import Any

import torch
from transformers import LlamaConfig

import sglang_qspec  # noqa: F401  (supplies kernels that SGLang imports on a CPU)

VOCAB = 4096


def _next(token_ids: Any) -> Any:
    """The token that the target chooses after each of `token_ids`, an int or a tensor."""
    return (5 * token_ids + 1237) % VOCAB


def prompt_of(number: int) -> list[int]:
    """One of VOCAB different prompts."""
    return [(61 * number + 7) % VOCAB]


def answer_of(prompt: Sequence[int], length: int) -> list[int]:
    """The target's output of this length."""
    ids = accumulate(range(length), lambda last, _: _next(last), initial=prompt[-1])
    return list(ids)[1:]


@contextmanager
def model() -> Iterator[str]:
    """A folder with the configuration of a small model, without weights."""
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=4096,
        ).save_pretrained(folder)
        yield folder


def send(
    scheduler: Any, number: int, prompt: Sequence[int], *, logprob: bool = False, **params: Any
) -> None:
    """Give SGLang's scheduler a request that is greedy by default, with this number as its id.

    `prompt` has token ids, and `params` are sampling parameters.
    """
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(**{"temperature": 0, "ignore_eos": True, **params})
    sampling.normalize(None)
    scheduler.handle_generate_request(
        TokenizedGenerateReqInput(
            rid=str(number),
            input_text="",
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=logprob,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
    )


class Device:
    """Counts launched passes, and the waits of the host for passes that are not complete."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        """("launch", n) or ("wait", n) for pass n, in order."""
        self.launched = self._complete = 0

    def launch(self) -> None:
        """Note the launch of a pass."""
        self.launched += 1
        self.events.append(("launch", self.launched))

    def wait(self, number: int) -> None:
        """Wait for the pass with this number."""
        if number > self._complete:
            self._complete = number
            self.events.append(("wait", number))

    def counts(self) -> dict[str, int]:
        """Passes and waits, and waits for the newest pass, during which the device does nothing.

        The wait for the last pass of a load is none of the latter.
        """
        newest, idle = 0, 0
        for name, number in self.events[:-1]:
            newest = number if name == "launch" else newest
            idle += name == "wait" and number == newest
        names = [name for name, _ in self.events]
        return {
            "passes": names.count("launch"),
            "waits": names.count("wait"),
            "idle_waits": idle,
        }

    def event(self) -> Any:
        """An event on this device, as `torch.cuda.Event`."""
        device = self

        class Event:
            def record(self, stream: Any = None) -> None:  # noqa: ARG002
                self._number = device.launched

            def synchronize(self) -> None:
                device.wait(self._number)

            def wait(self, stream: Any = None) -> None: ...

            def query(self) -> bool:
                return False

        return Event()


class Stubbed:
    """A scheduler of `requests` requests at most, with QSPEC or without speculation."""

    def __init__(self, model: str, *, qspec: bool, requests: int, **arguments: Any) -> None:
        """`model` is a folder that the function `model` made; `arguments` are SGLang's."""
        import sglang.srt.managers.scheduler as managers
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
        from sglang.srt.server_args import PortArgs, ServerArgs

        from sglang_qspec.engine import cpu
        from sglang_qspec.engine.start import arguments as defaults

        defaults.OVERLAPS.add("cpu")
        if qspec:
            load_plugins()
        else:
            cpu.activate()
        args = ServerArgs(
            model_path=model,
            device="cpu",
            dtype="float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            disable_radix_cache=True,
            context_length=2048,
            max_running_requests=requests,
            max_total_tokens=1024 * requests,
            log_level="warning",
            **({"speculative_algorithm": "QSPEC"} if qspec else {}),
            **arguments,
        )
        args.resolve_once()
        rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
        self.device = Device()
        self.scheduler = managers.Scheduler(args, PortArgs.init_new(args))
        assert self.scheduler.enable_overlap
        self.worker = self.scheduler.draft_worker if qspec else None
        self._numbers = count()
        self._install()

    def _install(self) -> None:
        """Replace the target's forward pass, and all waits of the host for the device."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.managers.overlap_utils import FutureMap
        from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput

        from sglang_qspec import transfers

        device, resolve = self.device, FutureMap.resolve_seq_lens_cpu
        table = torch.zeros(VOCAB, VOCAB)
        ids = torch.arange(VOCAB)
        table[ids, _next(ids)] = 1.0

        def forward(_: Any, forward_batch: Any, **__: Any) -> Any:
            device.launch()
            rows = forward_batch.input_ids
            if forward_batch.forward_mode.is_extend_without_speculative():
                rows = rows[forward_batch.extend_seq_lens.cumsum(0) - 1]
            return ModelRunnerOutput(LogitsProcessorOutput(table[rows]), True)

        def resolving(future_map: Any, batch: Any, *rest: Any) -> None:
            if getattr(batch.spec_info, "future_indices", None) is not None:
                device.wait(device.launched)
            resolve(future_map, batch, *rest)

        def copy(itself: Any, tensor: torch.Tensor) -> None:
            itself._host, itself._done = tensor, device.event()
            itself._done.record()

        for owner, name, double in (
            (ModelRunner, "forward", forward),
            (FutureMap, "resolve_seq_lens_cpu", resolving),
            (transfers.HostCopy, "__init__", copy),
            (torch.cpu, "Event", device.event),
        ):
            setattr(owner, name, double)

    def add(self, prompt: Sequence[int], **params: Any) -> Any:
        """Send a greedy request whose prompt has these token ids; returns SGLang's request."""
        send(self.scheduler, next(self._numbers), prompt, **params)
        return self.scheduler.waiting_queue[-1]

    def run(self, each: Callable[[], bool]) -> None:
        """Run SGLang's loop; `each` is called before each iteration, and returns False to end."""

        def ingest() -> None:
            self.scheduler.gracefully_exit = not each()

        self.scheduler.ingest_requests = ingest
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()
