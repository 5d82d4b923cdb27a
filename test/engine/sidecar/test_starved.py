"""The link learns when the sidecar cannot answer, because the target has its CPUs."""

from __future__ import annotations

import pytest

from sglang_qspec.link.fake import FakeSidecarLink
from test.engine.speculating import enqueue, make


@pytest.mark.parametrize("starved", [True, False])
@pytest.mark.parametrize("requests", [0, 1])
def test_the_sidecar_can_answer_while_no_request_keeps_its_cpus(
    starved: bool, requests: int
) -> None:
    link = FakeSidecarLink()
    active = make(link)
    for number in range(requests):
        enqueue(active, str(number))
    active.sidecar.starved = starved
    active.sidecar.receive()
    assert link.starved is (starved and requests > 0)


def test_a_sidecar_that_refuses_this_server_does_not_come() -> None:
    link = FakeSidecarLink()
    sidecars = make(link).sidecar
    assert sidecars.may_come
    assert not sidecars.ready
    link.refuse("another tokenizer")
    assert not sidecars.may_come
