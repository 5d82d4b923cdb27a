"""The measurements of `qspec models compare`, in their order."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tqdm import tqdm
from transformers import AutoTokenizer

from sglang_qspec.config import MAX_DRAFT_TOKENS, visible_gpus
from sglang_qspec.engine.placement.memory import weight_bytes
from sglang_qspec.engine.sidecar import model_pair
from sglang_qspec.errors import ConfigError
from sglang_qspec.policy.curve import Curve
from sglang_qspec.tools.compare.placement import default_device, place_models
from sglang_qspec.tools.compare.report import DraftFigures
from sglang_qspec.tools.compare.target_server import target_server
from sglang_qspec.tools.compare.widths import WIDTHS
from sglang_qspec.tools.measure.loaded_model import MOST_PASSES, ROWS
from sglang_qspec.tools.measure.model_process import Answer, ModelOptions, open_model
from sglang_qspec.tools.measure.pass_timer import PASSES, REPEATS, PassTimer
from sglang_qspec.tools.measure.tables import PairTimes, PassSeconds
from sglang_qspec.tools.models.prompts import chat_ids
from sglang_qspec.tools.theory.prediction import best_pipeline

STEP_S = 2.0
"""Time for the measurement of draft steps over one number of requests, in seconds."""
STEP_PROMPT_TOKENS = 256
"""Maximum number of prompt tokens before timed steps."""


class Comparison:
    """One run of the command. It refuses pairs of models that do not fit before it measures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._drafts: Sequence[str] = list(dict.fromkeys(options.draft))
        self._names = short_names(self._drafts)
        self._in_flight: Sequence[int] = sorted(set(options.in_flight))
        self._device: str = options.device or default_device()
        self._target_vocab = self._check_models()
        given = {"draft_device": options.draft_device, "cores": options.cores}
        self.placement = place_models(self._drafts[0], device=self._device, **given)
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

    def measure(self, prompts: Sequence[list[int]]) -> list[DraftFigures]:
        """The figures of each draft model."""
        answers, plain, passes = self._measure_target(prompts)
        return [self._measure_draft(path, answers, plain, passes) for path in self._drafts]

    def _measure_target(
        self, prompts: Sequence[list[int]]
    ) -> tuple[list[Answer], Curve, PassSeconds]:
        """Answers, greedy ones first, and pass times, from one or two servers.

        The times are those of plain passes on the CPUs of both models, and of passes beside a draft
        model.
        """
        widths = WIDTHS[self._device]
        divided = self.placement.target_cpus != self.placement.cpus
        cells = [(b, width) for b in self._in_flight for width in widths]
        first = [cell for cell in cells if cell[1] == 1 or not divided]
        steps = 2 + REPEATS * (len(first) + len(cells) * divided)
        with tqdm(total=steps, desc="starting the target") as progress:
            with self._server(prompts, self.placement.cpus, progress) as server:
                progress.set_description("writing answers")
                answers: list[Answer] = []
                for temperature in (None, self._options.temperature):
                    answers += server.answers(prompts, self._options.tokens, temperature)
                    progress.update()
                progress.set_description("timing passes")
                verify = server.pass_seconds(prompts, first, progress.update)
                plain = Curve.through((b, verify[b, 1]) for b in self._in_flight)
            if divided:
                progress.set_description("starting the target on its CPUs")
                with self._server(prompts, self.placement.target_cpus, progress) as server:
                    progress.set_description("timing passes")
                    verify = server.pass_seconds(prompts, cells, progress.update)
            progress.set_description("target")
        return answers, plain, PassSeconds(verify)

    def _server(
        self, prompts: Sequence[list[int]], cpus: frozenset[int], progress: tqdm
    ) -> AbstractContextManager[PassTimer]:
        flags = ["--dtype", self._options.dtype]
        if self._options.trust_remote_code:
            flags.append("--trust-remote-code")
        return target_server(
            self._options.target,
            device=self._device,
            cpus=cpus,
            slots=max(len(prompts), *self._in_flight),
            widest=max(WIDTHS[self._device]),
            context=max(map(len, prompts)) + max(self._options.tokens, PASSES) + MAX_DRAFT_TOKENS,
            tick=progress.refresh,
            flags=flags,
        )

    def _measure_draft(
        self, path: str, answers: Sequence[Answer], plain: Curve, passes: PassSeconds
    ) -> DraftFigures:
        name, options = self._names[path], self._model_options(path, answers)
        agreed: list[list[bool]] = []
        with (
            tqdm(total=1 + len(answers) + len(self._in_flight), desc=f"loading {name}") as progress,
            open_model(f"draft model {name}", options, visible_gpus()) as model,
        ):
            facts = model.call("describe")
            progress.update()
            progress.set_description(f"reading answers with {name}")
            given = {"target_vocab": self._target_vocab, "temperature": self._options.temperature}
            for start in range(0, len(answers), ROWS):
                part = answers[start : start + ROWS]
                agreed += model.call("agreed", answers=part, **given)
                progress.update(len(part))
            progress.set_description(f"timing steps of {name}")
            step_seconds: dict[int, float] = {}
            for requests in self._in_flight:
                step_seconds[requests] = model.call("pass_seconds", rows=requests, seconds=STEP_S)
                progress.update()
            memory_bytes = model.call("memory_bytes")
            progress.set_description(name)
        half = len(answers) // 2
        greedy, sampled = agreed[:half], agreed[half:]
        step = Curve.through(step_seconds.items())
        times = PairTimes(plain, passes, step, overlaps=self.placement.overlaps)
        return DraftFigures(
            name,
            path,
            times,
            greedy,
            sampled,
            weight_bytes(path),
            memory_bytes,
            facts["dtype"],
            facts["quantization"],
            [best_pipeline(times, greedy, b) for b in self._in_flight],
            [best_pipeline(times, sampled, b) for b in self._in_flight],
        )

    def _model_options(self, path: str, answers: Sequence[Answer]) -> ModelOptions:
        """How to load a draft model: as a sidecar would, with KV for the answers only."""
        longest = max(len(each.prompt_ids) + len(each.token_ids) for each in answers)
        rows, room = max(ROWS, *self._in_flight), longest + MOST_PASSES + 2
        on_cpu = self.placement.draft_device == "cpu"
        return ModelOptions(
            path=path,
            device=self.placement.draft_device,
            cores=self.placement.draft_cores,
            halves_threads=on_cpu and not self.placement.draft_cpus,
            dtype=self._options.dtype,
            quantization=self._options.draft_quantization,
            trust_remote_code=self._options.trust_remote_code,
            tokens=rows * room,
            context_len=room,
            rows=rows,
            contexts=[
                each.prompt_ids[:STEP_PROMPT_TOKENS] for each in answers[: len(answers) // 2]
            ],
        )


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """The last part of each path, or the whole path if two have the same last part."""
    last = {path: Path(path).name or path for path in paths}
    counts = Counter(last.values())
    return {path: name if counts[name] == 1 else path for path, name in last.items()}
