"""Heads are trained as they draft, and a killed training ends like one that was not killed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_qspec.__main__ import main
from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.heads import checkpoint
from sglang_qspec.heads.config import HeadKind
from sglang_qspec.heads.model import Eagle2Head
from sglang_qspec.tools.train_head import trainer
from sglang_qspec.tools.train_head.command import OWN_IDS, Training, train_head
from sglang_qspec.tools.train_head.prompts import PROMPTS
from sglang_qspec.tools.train_head.target import TargetModel, WrittenText
from sglang_qspec.tools.train_head.texts import written
from sglang_qspec.tools.train_head.training import DECAY, PaddedTexts, Teacher, depths, loss
from test.heads.tiny import (
    VOCAB,
    Drafting,
    random_eagle2,
    random_head,
    random_hydra,
    write_target,
)

CPU = torch.device("cpu")
SHORT: Any = {"tokens": 24, "draft_vocab": 200, "batch_tokens": 1024, "dtype": "float32"}
DEPTH = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.mark.parametrize("kind", [HeadKind.EAGLE3, HeadKind.EAGLE2])
def test_each_depth_computes_what_drafting_computes(kind: HeadKind) -> None:
    head = random_head() if kind is HeadKind.EAGLE3 else random_eagle2()
    torch.manual_seed(3)
    embedding = torch.randn(VOCAB, 64)
    if isinstance(head, Eagle2Head):
        head.lm_head = 0.2 * torch.randn(VOCAB, 64)
    text = WrittenText(
        torch.randint(VOCAB, (5,)).tolist(), torch.randint(VOCAB, (9,)).tolist(), True
    )
    ids = text.token_ids
    states = torch.randn(1, len(ids), head.config.states * 64)
    batch = PaddedTexts.of([text, WrittenText([1], [2, 3], False)], CPU)  # the other one is padded
    both = torch.cat((states, torch.randn_like(states)))
    with torch.inference_mode():
        outputs = depths(head, both, batch, embedding, DEPTH)
        found = [head.logits(output) for output in outputs]
        projected = head.project(states[0])
        drafting = Drafting(head, embedding)
        for place in range(len(ids) - 1 - DEPTH):
            output = drafting.row(ids[place + 1], projected[place])
            for depth in range(DEPTH):
                own = head.logits(output)
                torch.testing.assert_close(found[depth][0, place], own, rtol=1e-4, atol=1e-4)
                output = drafting.row(ids[place + 2 + depth], output)
            drafting.cut(place + 1)


def test_each_depth_of_a_hydra_head_computes_what_drafting_computes() -> None:
    head = random_hydra()
    torch.manual_seed(3)
    embedding, states = torch.randn(VOCAB, 64), torch.randn(1, 12, 64)
    text = WrittenText([5, 6, 7], torch.randint(VOCAB, (9,)).tolist(), True)
    batch = PaddedTexts.of([text], CPU)
    with torch.inference_mode():
        found = list(depths(head, states, batch, embedding, DEPTH))
        for place in range(12 - 1 - DEPTH):
            output = states[0, place]
            for depth in range(DEPTH):
                output = head.output(embedding[text.token_ids[place + 1 + depth]], output)
                torch.testing.assert_close(found[depth][0, place], output, rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_cross_entropy_of_the_answers_tokens(target: Path) -> None:
    model, head = TargetModel(target, "float32"), random_head()
    known = head.target_ids[:7].tolist()
    unknown = min(set(range(VOCAB)) - set(head.target_ids.tolist()))
    texts = [
        WrittenText(known[:3], known[3:], True),
        WrittenText(known[:1], [known[1], unknown], False),
    ]
    batch, teacher = PaddedTexts.of(texts, CPU), Teacher(model, head)
    states = model.states(batch.token_ids, (0, 1, 2))
    wanted = teacher.logits(states.last.clone()).softmax(-1)
    expected = 0.0
    outputs = list(depths(head, states.read.clone(), batch, model.embedding, DEPTH))
    for depth, output in enumerate(outputs):
        own, losses = head.logits(output).log_softmax(-1), []
        for row, text in enumerate(texts):
            for at in range(len(text.prompt), len(text.token_ids)):
                place = at - 2 - depth  # this row drafts token `at`
                if place >= 0 and bool(teacher.knows(batch.token_ids[row, at])):
                    losses.append(-(wanted[row, at - 1] * own[row, place]).sum().item())
        expected += DECAY**depth * sum(losses) / max(1, len(losses))
    found = loss(head, teacher, model, batch, (0, 1, 2), DEPTH)
    assert found.item() == pytest.approx(expected, rel=1e-4)
    assert expected > 0


def test_rows_count_where_they_draft_the_answer() -> None:
    batch = PaddedTexts.of(
        [WrittenText([1, 2, 3], [4, 5], True), WrittenText([1], [2, 3, 4, 5, 6], False)], CPU
    )
    assert batch.answers(0).tolist() == [
        [False, True, True, False, False, False],
        [True, True, True, True, False, False],
    ]
    assert batch.answers(1)[0].tolist() == [True, True, False, False, False, False]
    assert batch.tokens(2)[1].tolist() == [3, 4, 5, 6, 0, 0]


def test_the_target_shows_the_outputs_of_its_layers(target: Path) -> None:
    model = TargetModel(target, "float32")
    ids = torch.tensor([[5, 6, 7, 8]])
    found: dict[int, torch.Tensor] = {}
    inner = model._model.base_model
    for number, layer in enumerate(inner.layers):
        layer.register_forward_hook(lambda *call, place=number: found.update({place: call[2]}))
    states = model.states(ids, (1, 4))
    assert torch.equal(states.read, torch.cat((found[1], found[4]), -1))
    logits = model._model(ids).logits
    torch.testing.assert_close(states.last @ model.lm_head.T, logits)


def test_the_command_trains_a_head(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    output = tmp_path / "head"
    command = ["models", "train-head", "--model", str(target), "--output", str(output)]
    short = ["--num-prompts", "40", "--tokens", "24", "--draft-vocab", "200", "--epochs", "12"]
    more = ["--batch-tokens", "1024", "--dtype", "float32", "--layers", "0", "3"]
    with caplog.at_level("INFO"):
        assert main([*command, *short, *more]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(output)
    head = checkpoint.load(output, torch.float32, CPU)
    assert (head.config.draft_vocab_size, head.config.layers) == (200, (0, 3))
    line = next(text for text in caplog.messages if "first draft tokens" in text)
    assert float(line.split("prompts ")[1].split(" %")[0]) > 10
    assert [path.name for path in tmp_path.iterdir()] == ["head", ".head.lock"]


@pytest.mark.parametrize("kind", ["eagle2", "medusa", "hydra"])
def test_the_command_trains_other_kinds(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    output = tmp_path / "head"
    command = ["models", "train-head", "--model", str(target), "--output", str(output)]
    short = ["--num-prompts", "40", "--tokens", "24", "--epochs", "12", "--kind", kind]
    short += ["--draft-vocab", "200"] if kind == "hydra" else []
    with caplog.at_level("INFO"):
        assert main([*command, *short, "--batch-tokens", "1024", "--dtype", "float32"]) == 0
    if kind == "eagle2":
        head = checkpoint.load(output, torch.float32, CPU)
        assert "lm_head" not in " ".join(head.state_dict())  # it is the target's
    elif kind == "medusa":
        assert checkpoint.load_medusa(output, torch.float32, CPU).config.heads == DEPTH
    else:
        assert checkpoint.load_hydra(output, torch.float32, CPU).config.draft_vocab_size == 200
    line = next(text for text in caplog.messages if "first draft tokens" in text)
    assert float(line.split("prompts ")[1].split(" %")[0]) > 10


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "medusa", "hydra"])
def test_a_killed_training_goes_on(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(trainer, "KEEP_S", 0.0)
    ids = SHORT["draft_vocab"] if kind in OWN_IDS else None
    training = Training(**{"kind": kind, "epochs": 2, **SHORT, "draft_vocab": ids})
    prompts = PROMPTS[:20]
    loads = {"medusa": checkpoint.load_medusa, "hydra": checkpoint.load_hydra}
    load: Any = loads.get(kind, checkpoint.load)
    step = trainer.Trainer._step

    def train(name: str, most: int = 1000) -> int:
        """Train, killed after `most` steps; returns the number of steps."""
        done = 0

        def counting(self: trainer.Trainer, texts: list[WrittenText]) -> float:
            nonlocal done
            if done == most:
                raise KeyboardInterrupt
            done += 1
            return step(self, texts)

        monkeypatch.setattr(trainer.Trainer, "_step", counting)
        with contextlib.suppress(KeyboardInterrupt):
            train_head(target, tmp_path / name, prompts, training)
        return done

    steps = train("whole")
    assert train("killed", most=3) == 3
    monkeypatch.setattr(TargetModel, "answers", None)  # all texts are written
    assert train("killed") == steps - 3
    whole, killed = (load(tmp_path / name, torch.float32, CPU) for name in ("whole", "killed"))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(killed.state_dict()[name], tensor), name


def test_texts_are_written_once(target: Path, tmp_path: Path) -> None:
    model, path = TargetModel(target, "float32"), tmp_path / "texts.jsonl"
    prompts = PROMPTS[:40]
    given: Any = {"answers": 2, "tokens": 8, "seed": 1}
    texts = written(model, prompts, path, **given)
    assert [text.greedy for text in texts] == [True] * 40 + [False] * 40
    assert [text.prompt for text in texts[:40]] == model.encode(prompts)
    assert all(1 <= len(text.answer) <= 8 for text in texts)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:32]) + lines[32][:5])
    assert written(model, prompts, path, **given) == texts


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (Training(draft_vocab=261), "draft vocab is 261, but the target has 260"),
        (Training(layers=(5,)), "different layers from 0 to 4"),
        (Training("eagle2", draft_vocab=9), "--draft-vocab is 9, but only eagle3 and hydra heads"),
        (Training("hydra", layers=(1,)), r"--layers is \(1,\), but only an eagle3 head has"),
        (Training("hydra", draft_vocab=261), "draft vocab is 261, but the target has 260"),
        (Training("eagle2", layers=(1,)), r"--layers is \(1,\), but only an eagle3 head has"),
    ],
)
def test_arguments_that_do_not_fit(
    target: Path, tmp_path: Path, training: Training, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_head(target, tmp_path / "head", PROMPTS, training)
    with pytest.raises(ConfigError, match="there are 1 prompts"):
        train_head(target, tmp_path / "head", PROMPTS[:1], Training())
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "file").touch()
    with pytest.raises(QSpecError, match="exists already"):
        train_head(target, tmp_path / "head", PROMPTS, Training())
