"""Tells which draft tokens have saved the target tokens of passes."""

from __future__ import annotations

from sglang_qspec.policy.draft_worth import DraftWorth
from sglang_qspec.sidecar.prompt import Prompt
from sglang_qspec.sidecar.subscription import Subscription
from sglang_qspec.sidecar.text import Aim, Completion


def judge(worth: DraftWorth, prompt: Prompt, subscription: Subscription, before: int) -> None:
    """Judge the draft tokens at the output positions from `before` on, which were just committed.

    The target itself gives the last token of a commit, and at each other position one of the right
    drafts is enough: the completions count first, in their order, then the step draft. The first
    token of an answer is that of the prefill, so no draft of it is judged.
    """
    output, drafted = subscription.output_ids, set[int]()
    start = len(prompt.token_ids)

    def judge_draft(draft: Completion, *, chain: bool) -> None:
        offset, agrees = len(draft.text.token_ids) - start, True
        end = offset + len(draft.token_ids)
        for place in range(max(before, offset, 1), min(len(output), end)):
            right = draft.token_ids[place - offset] == output[place]
            agrees = (agrees or not chain) and right
            note(draft, place - offset, saved=agrees and place not in drafted and place < last)
            if agrees:
                drafted.add(place)
        if chain and not agrees:
            for place in range(len(output), end):
                note(draft, place - offset, saved=False)

    def note(draft: Completion, index: int, *, saved: bool) -> None:
        aim = Aim.unpack(draft.aims[index])
        worth.judge(aim.purpose, aim.position, saved=saved)

    last = len(output) - 1
    for share in subscription.shares:
        judge_draft(share.completion, chain=False)
    if subscription.step_draft is not None:
        judge_draft(subscription.step_draft.completion, chain=True)
