import pytest
import torch
import transformers

from sglang_qspec.errors import DraftModelError
from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.tools.models import DemoModels

PROMPTS = (
    [504, 3575, 282, 4649, 314],
    [1, 4093, 198, 1780, 314, 260, 10285, 282, 5575, 47, 198],
    list(range(1000, 1040)),
)


@pytest.fixture(scope="module")
def reference(models: DemoModels) -> list[list[int]]:
    """The greedy continuations of PROMPTS by transformers, 20 tokens each."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        models.target, dtype=torch.float32, attn_implementation="eager"
    )
    results = []
    for prompt in PROMPTS:
        sequence = list(prompt)
        with torch.inference_mode():
            for _ in range(20):
                logits = model(torch.tensor([sequence]), use_cache=False).logits
                sequence.append(int(logits[0, -1].argmax()))
        results.append(sequence[len(prompt) :])
    return results


def _greedy(
    model: DraftModel, rows: list[int], logits: torch.Tensor, count: int
) -> list[list[int]]:
    """The next `count` tokens of each row; the KV does not yet hold the last one."""
    told = [[token] for token in logits.argmax(-1).tolist()]
    for _ in range(count - 1):
        logits = model.step(rows, [tokens[-1] for tokens in told])
        for tokens, token in zip(told, logits.argmax(-1).tolist(), strict=True):
            tokens.append(token)
    return told


def test_a_batch_of_rows_continues_as_transformers_does(
    model: DraftModel, reference: list[list[int]]
) -> None:
    rows = [model.rows.open() for _ in PROMPTS]
    logits = model.extend(rows, PROMPTS)
    assert _greedy(model, rows, logits, 20) == reference
    assert [model.rows.length(row) for row in rows] == [len(prompt) + 19 for prompt in PROMPTS]
    model.rows.check_integrity()
    for row in rows:
        model.rows.close(row)


def test_a_prompt_prefilled_in_chunks_gives_the_same_continuation(
    model: DraftModel, reference: list[list[int]]
) -> None:
    row = model.rows.open()
    model.extend([row], [PROMPTS[2][:17]])
    model.extend([row], [PROMPTS[2][17:18]])
    logits = model.extend([row], [PROMPTS[2][18:]])
    assert _greedy(model, [row], logits, 20)[0] == reference[2]
    model.rows.close(row)


def test_forked_rows_continue_like_independent_rows(
    model: DraftModel, reference: list[list[int]]
) -> None:
    prompt = PROMPTS[1]
    parent = model.rows.open()
    model.extend([parent], [[*prompt, 260, 3575]])
    free = model.rows.free_slots
    forks = [model.rows.fork(parent, len(prompt) - 1) for _ in range(3)]
    assert model.rows.free_slots == free
    model.rows.close(parent)
    model.rows.check_integrity()
    logits = model.extend(forks, [prompt[-1:], [prompt[-1], reference[1][0]], [504, 3575]])
    told = _greedy(model, forks, logits, 8)
    assert told[0] == reference[1][:8]
    assert told[1] == reference[1][1:9]
    fresh = model.rows.open()
    logits = model.extend([fresh], [[*prompt[:-1], 504, 3575]])
    assert told[2] == _greedy(model, [fresh], logits, 8)[0]
    for row in (*forks, fresh):
        model.rows.close(row)


def test_a_truncated_row_continues_like_a_new_one(
    model: DraftModel, reference: list[list[int]]
) -> None:
    row = model.rows.open()
    model.extend([row], [[*PROMPTS[0], 11, 12, 13, 14]])
    twin = model.rows.fork(row, len(PROMPTS[0]) + 2)
    free = model.rows.free_slots
    model.rows.truncate(row, len(PROMPTS[0]) - 1)
    assert model.rows.free_slots == free + 2  # the forked row still holds the other tokens
    logits = model.step([row], PROMPTS[0][-1:])
    assert _greedy(model, [row], logits, 20)[0] == reference[0]
    model.rows.check_integrity()
    model.rows.close(twin)
    model.rows.close(row)


def test_a_pass_without_room_is_refused_and_changes_nothing(model: DraftModel) -> None:
    row = model.rows.open()
    model.extend([row], [[5] * 300])
    free = model.rows.free_slots
    with pytest.raises(DraftModelError, match="of at most 512"):
        model.extend([row], [[5] * 213])
    with pytest.raises(DraftModelError, match="cannot share"):
        model.rows.fork(row, 301)
    with pytest.raises(DraftModelError, match="cannot truncate"):
        model.rows.truncate(row, 301)
    others = [model.rows.open() for _ in range(63)]
    with pytest.raises(DraftModelError, match="64 KV rows"):
        model.rows.open()
    with pytest.raises(DraftModelError, match="KV slots"):
        model.extend(others, [[5] * 100] * 63)
    assert model.rows.free_slots == free
    assert model.rows.length(row) == 300
    model.rows.check_integrity()
    for each in (row, *others):
        model.rows.close(each)
    with pytest.raises(DraftModelError, match="not open"):
        model.rows.close(row)


def test_the_draft_model_reports_vocabulary_context_eos_and_tokenizer(
    model: DraftModel, models: DemoModels
) -> None:
    assert model.vocab_size == 49152
    assert model.rows.context_len == 512
    assert model.eos_token_ids == {2}
    assert len(model.fingerprint()) == 64
