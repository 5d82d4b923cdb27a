"""Passes of different widths relay their tokens to the next pass through SGLang's own buffers."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from sglang_qspec.engine.passes.launch.relay import last_ids, relayed

WIDEST = 4


class Pool:
    """SGLang's buffers for requests in slots 0 to 5."""

    def __init__(self) -> None:
        pool: Any = SimpleNamespace(req_to_token=torch.zeros(6, 8, dtype=torch.int32))
        algorithm: Any = SimpleNamespace(is_ngram=lambda: True, is_some=lambda: True)
        self._map = FutureMap(torch.device("cpu"), algorithm, pool)

    def stash(
        self,
        slots: list[int],
        token_ids: list[int],
        lens: list[int],
        dtype: torch.dtype = torch.int32,
    ) -> None:
        """A pass of the requests in these slots, with the same number of columns for each."""
        accept_lens = torch.tensor(lens, dtype=torch.int32)
        relay = relayed(
            torch.tensor(token_ids, dtype=dtype), accept_lens, torch.ones(len(lens)), WIDEST
        )
        self._map.stash(torch.tensor(slots), RelayPayload.from_ngram(relay))

    def last_ids(self, slots: list[int]) -> list[int]:
        """The input tokens of the next pass over the requests in `slots`."""
        carried = NgramVerifyInput(
            draft_token_num=WIDEST,
            future_indices=torch.tensor(slots),
            new_seq_lens=torch.ones(len(slots)),
        )
        batch: Any = SimpleNamespace(spec_info=carried)
        self._map._resolve_spec_extras(batch)
        ids: list[int] = last_ids(batch).tolist()
        return ids


def test_passes_of_all_widths_share_one_buffer() -> None:
    pool = Pool()
    pool.stash([1, 3], [10, 20], [1, 1], torch.int64)  # a prefill
    pool.stash([3, 5], [30, 31, 0, 50, 51, 52], [2, 3])
    pool.stash([2], [60, 61, 62, 63], [4])
    assert pool.last_ids([5, 1, 3, 2]) == [52, 10, 31, 63]


def test_a_batch_without_requests_relays_nothing() -> None:
    lens = torch.zeros(0, dtype=torch.int32)
    relay = relayed(torch.zeros(0, dtype=torch.int64), lens, torch.zeros(0), WIDEST)
    assert relay.accept_tokens.shape == (0,)
