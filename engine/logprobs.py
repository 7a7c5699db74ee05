"""Log probabilities of tokens, generated or of a prompt: from logits on the device to entries on the host.

They are of the raw logits, whatever the temperature. Owns the layout in which they travel, and whose they are. Those of a
prompt come from the hidden states that its chunks give anyway. Called by `engine/sampler` and `engine/runner`.

S rows, V vocabulary, k likeliest tokens that are told of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.batch import PromptPart
from engine.request import TokenLogprob
from engine.state import RequestState
from engine.transfer import HostCopy


def pack_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """[S, 1 + 2k] float64: the log probability of each row's token, the k highest, and their ids (exact in float64).

    Args:
        logits: [S, V] float32.
        token_ids: [S] int64, between 0 and V - 1.
        num_top: k, unless V is less.
    """
    logprobs = logits.log_softmax(dim=-1)
    top_values, top_ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return torch.cat([logprobs.gather(-1, token_ids.unsqueeze(-1)).double(), top_values.double(), top_ids.double()], -1)


def unpack_logprob(values: Sequence[float], token_id: int, num_wanted: int) -> TokenLogprob:
    """A row of `pack_logprobs` as an entry, with at most `num_wanted` of its likeliest tokens."""
    num_top = len(values) // 2
    top = zip(values[1 + num_top :], values[1 : 1 + min(num_wanted, num_top)], strict=False)
    return TokenLogprob(token_id, values[0], tuple((int(top_id), value) for top_id, value in top))


class PromptLogprobs:
    """Those of the prompt tokens of one step, on their way to the host.

    Args:
        packed: [S, 1 + 2k] float64, as `pack_logprobs` lays them out; the rows of all parts, in order. None where S is 0.
        parts: whose they are.
    """

    def __init__(self, packed: Tensor | None, parts: Sequence[PromptPart]) -> None:
        self._packed = None if packed is None else HostCopy(packed)
        self._parts = parts

    def read(self) -> Iterator[tuple[RequestState, list[TokenLogprob | None]]]:
        """For each request entries of its next prompt tokens, None for placeholders; waits until the device has them."""
        rows = iter([] if self._packed is None else self._packed.read().tolist())
        for part in self._parts:
            entries: list[TokenLogprob | None] = [None] * (part.end - part.start)
            for place in part.scored:
                token_id = part.state.token_ids[place]
                entries[place - part.start] = unpack_logprob(next(rows), token_id, part.num_top)
            yield part.state, entries
