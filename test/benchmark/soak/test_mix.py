"""The request mix of a soak: repeatable, complete, and with request ids that never collide."""

from __future__ import annotations

import itertools
from collections import Counter

from benchmark.soak.answers import Answer, Part
from benchmark.soak.mix import LONG_RID, Fate, Mix, Request
from benchmark.soak.templates import CHAT, COMPLETIONS, GENERATE, Template, pool
from sglang_qspec import guess_tags

TEMPLATES = pool(60)
REFERENCES = {
    number: Answer((Part(f"right answer {number}", (7, 8, number), "length", None),), 5, 3)
    for number in range(60)
}


def drawn(seed: int = 3) -> list[Request]:
    """The first requests of a mix; each ends five requests later."""
    mix = Mix(seed, TEMPLATES, REFERENCES)
    found: list[Request] = []
    for _ in range(1500):
        found.append(mix.next())
        if len(found) > 5:
            mix.end(found[-6])
    return found


REQUESTS = drawn()


def text_of(request: Request) -> str:
    body = request.body
    if request.template.path == CHAT:
        (message,) = body["messages"]
        return str(message["content"])
    return str(body["text"] if request.template.path == GENERATE else body["prompt"])


def custom_of(request: Request) -> dict[str, object]:
    body = request.body
    holder = body["sampling_params"] if request.template.path == GENERATE else body
    found: dict[str, object] = holder.get("custom_params", {})
    return found


def test_the_pool_is_the_same_each_time_and_has_every_endpoint_greedy_and_seeded() -> None:
    assert pool(60) == TEMPLATES
    assert [template.number for template in TEMPLATES] == list(range(60))
    kinds = {(template.path, template.greedy) for template in TEMPLATES}
    assert kinds == set(itertools.product((GENERATE, COMPLETIONS, CHAT), (True, False)))
    assert all("sampling_seed" in t.sampling for t in TEMPLATES if not t.greedy)
    for name in ("stop", "ignore_eos", "n", "top_k", "top_p", "min_p", "frequency_penalty"):
        assert any(name in template.sampling for template in TEMPLATES), name


def test_a_mix_is_repeatable_and_has_every_kind_of_request() -> None:
    assert drawn() == REQUESTS != drawn(seed=4)
    counts = Counter(kind for request in REQUESTS for kind in request.kinds)
    for kind in (
        *(GENERATE, COMPLETIONS, CHAT, "greedy", "seeded", "sampled", "stream", "n", "stop"),
        *("ignore_eos", "controls", "right guess", "wrong guess", "bad"),
        *("guess by tag", "guess by texts", "guess by ids"),
        *("long rid", "unicode rid", "odd rid", "repeated rid"),
    ):
        assert counts[kind] > 10, kind
    fates = Counter(request.fate for request in REQUESTS)
    assert all(fates[fate] > 30 for fate in Fate)
    cut = [request for request in REQUESTS if request.fate is Fate.HANG_UP]
    assert any(r.after_pieces for r in cut)
    assert all((r.after_s is None) != (r.after_pieces is None) for r in cut)
    assert all(r.body.get("stream") for r in cut if r.after_pieces)


def test_an_aborted_request_id_is_no_prefix_of_another() -> None:
    """SGLang aborts every request with an id that begins with the id of the abort."""
    names = [request.rid for request in REQUESTS if request.rid is not None]
    aborted = [request.rid for request in REQUESTS if request.fate is Fate.ABORT]
    assert None not in aborted
    for name in aborted:
        assert sum(other.startswith(str(name)) for other in names) == 1


def test_a_request_id_is_reused_only_after_its_request_has_ended() -> None:
    mix = Mix(3, TEMPLATES, REFERENCES)
    names = [request.rid for request in (mix.next() for _ in range(500)) if request.rid]
    assert len(set(names)) == len(names)  # none has ended
    names = [request.rid for request in REQUESTS if request.rid]
    assert len(set(names)) < len(names)
    assert any(len(name) == LONG_RID for name in names)
    for number, request in enumerate(REQUESTS):
        # The last five have not ended.
        in_flight = [other.rid for other in REQUESTS[max(0, number - 5) : number]]
        assert request.rid is None or request.rid not in in_flight


def test_guesses_leave_the_prompt_unchanged_and_are_valid() -> None:
    right = 0
    for request in REQUESTS:
        if request.fate is Fate.BAD:
            continue
        text, guesses = guess_tags.split(text_of(request), guess_tags.GuessLimits())
        assert text == request.template.text
        right += any(g.startswith("right answer") for g in guesses)
        ids = custom_of(request).get(guess_tags.GUESS_IDS_KEY)
        if ids is not None:
            right += guess_tags.read_guess_ids(ids, 49152)[0][:2] == [7, 8]
        texts = custom_of(request).get(guess_tags.GUESSES_KEY)
        if texts is not None:
            right += guess_tags.read_guess_texts(texts)[0].startswith("right answer")
    assert right > 50


def test_openai_endpoints_get_parameters_under_their_openai_names() -> None:
    sampling = {"temperature": 0, "max_new_tokens": 5, "sampling_seed": 3, "n": 2}
    body = Template(COMPLETIONS, "x", sampling).body("y", {"qspec_enabled": False}, stream=True)
    assert body == {
        "model": "m",
        "prompt": "y",
        "temperature": 0,
        "max_tokens": 5,
        "seed": 3,
        "n": 2,
        "custom_params": {"qspec_enabled": False},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    own = Template(GENERATE, "x", sampling).body("y", {}, rid="r")
    assert own == {"text": "y", "sampling_params": sampling, "rid": "r"}
