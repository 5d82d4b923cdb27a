"""The measurements of `qspec models compare`, in their order."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm
from transformers import AutoTokenizer

from sglang_qspec.config import MAX_DRAFT_TOKENS
from sglang_qspec.engine.placement.memory import weight_bytes
from sglang_qspec.engine.sidecar import model_pair
from sglang_qspec.errors import ConfigError
from sglang_qspec.policy.curve import Curve
from sglang_qspec.tools.compare import draft_reader, place
from sglang_qspec.tools.compare.answers import WIDTHS, Answer
from sglang_qspec.tools.compare.forecast import PassSeconds, forecast
from sglang_qspec.tools.compare.pass_timer import PASSES
from sglang_qspec.tools.compare.report import Candidate
from sglang_qspec.tools.compare.target_server import TargetServer
from sglang_qspec.tools.models.prompts import chat_ids


class Comparison:
    """One run of the command. It refuses pairs of models that do not fit before it measures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._drafts: Sequence[str] = list(dict.fromkeys(options.draft))
        self._names = short_names(self._drafts)
        self._in_flight: Sequence[int] = sorted(set(options.in_flight))
        self._device: str = options.device or place.default_device()
        self._target_vocab = self._check_models()
        given = {"draft_device": options.draft_device, "cores": options.cores}
        self.place = place.find_place(self._drafts[0], device=self._device, **given)
        """Where target and draft models run."""

    def _check_models(self) -> int:
        """The target's number of token ids. Raises ConfigError unless all have one tokenizer."""
        trusts = self._options.trust_remote_code
        target = model_pair.describe_given("--target", self._options.target, trusts, None)
        for path in self._drafts:
            draft = model_pair.describe_given("--draft", path, trusts, None)
            if draft.fingerprint != target.fingerprint:
                objection = model_pair.tokenizer_objection(target, draft)
                raise ConfigError(f"--draft is {path!r}, but {objection}")
        return target.vocab_size

    def prompt_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The prompts in the target's chat template."""
        tokenizer = AutoTokenizer.from_pretrained(
            self._options.target, trust_remote_code=self._options.trust_remote_code
        )
        return chat_ids(tokenizer, texts)

    def measure(self, prompts: Sequence[list[int]]) -> tuple[list[Candidate], PassSeconds]:
        """The figures of each draft model, and the target's pass times."""
        answers, passes = self._measure_target(prompts)
        return [self._measure_draft(path, answers, passes) for path in self._drafts], passes

    def _measure_target(self, prompts: Sequence[list[int]]) -> tuple[list[Answer], PassSeconds]:
        """Answers, greedy ones first, and pass times, from one or two servers.

        Without a draft model the target has the CPUs of both.
        """
        widths = WIDTHS[self._device]
        divided = self.place.target_cpus != self.place.cpus
        cells = [(b, width) for b in self._in_flight for width in widths]
        verify: dict[tuple[int, int], float] = {}
        steps = 2 + len(self._in_flight) * divided + len(cells)
        with tqdm(total=steps, desc="starting the target") as progress:
            with self._server(prompts, self.place.cpus) as server:
                server.start(progress.refresh)
                progress.set_description("writing answers")
                answers: list[Answer] = []
                for temperature in (None, self._options.temperature):
                    answers += server.answers(prompts, self._options.tokens, temperature)
                    progress.update()
                progress.set_description("timing passes")
                for b, width in cells:
                    if width == 1 or not divided:
                        verify[b, width] = server.pass_seconds(prompts, b, width)
                        progress.update()
                plain = {b: verify[b, 1] for b in self._in_flight}
            if divided:
                progress.set_description("starting the target on its CPUs")
                with self._server(prompts, self.place.target_cpus) as server:
                    server.start(progress.refresh)
                    progress.set_description("timing passes")
                    for b, width in cells:
                        verify[b, width] = server.pass_seconds(prompts, b, width)
                        progress.update()
            progress.set_description("target")
        return answers, PassSeconds(plain, verify)

    def _server(self, prompts: Sequence[list[int]], cpus: frozenset[int]) -> TargetServer:
        flags = ["--dtype", self._options.dtype]
        if self._options.trust_remote_code:
            flags.append("--trust-remote-code")
        return TargetServer(
            self._options.target,
            device=self._device,
            cpus=cpus,
            slots=max(len(prompts), *self._in_flight),
            widest=max(WIDTHS[self._device]),
            context=max(map(len, prompts)) + max(self._options.tokens, PASSES) + MAX_DRAFT_TOKENS,
            flags=flags,
        )

    def _measure_draft(
        self, path: str, answers: Sequence[Answer], passes: PassSeconds
    ) -> Candidate:
        found = draft_reader.read(
            draft_reader.Job(
                path,
                self.place.draft_device,
                self.place.draft_cpus,
                answers,
                self._options.temperature,
                self._in_flight,
                self._target_vocab,
                self._options.dtype,
                self._options.draft_quantization,
                self._options.trust_remote_code,
            )
        )
        half = len(answers) // 2
        greedy, sampled = found.agreed[:half], found.agreed[half:]
        step = Curve.through(found.step_seconds.items())
        forecasts = [
            [
                forecast(agreed, b, passes, step, overlaps=self.place.overlaps)
                for b in self._in_flight
            ]
            for agreed in (greedy, sampled)
        ]
        return Candidate(
            self._names[path],
            path,
            greedy,
            sampled,
            found.step_seconds,
            weight_bytes(path),
            found.memory_bytes,
            found.dtype,
            found.quantization,
            *forecasts,
        )


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """The last part of each path, or the whole path if two have the same last part."""
    last = {path: Path(path).name or path for path in paths}
    counts = Counter(last.values())
    return {path: name if counts[name] == 1 else path for path, name in last.items()}
