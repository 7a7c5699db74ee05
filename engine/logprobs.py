"""Log probabilities of tokens, generated or of a prompt: from logits on the device to entries on the host.

They are of the raw logits, whatever the temperature. Owns the layout in which they travel, and whose they are. Those of a
prompt come from the hidden states that its chunks give anyway, and stay packed until the answer's reader looks at them. Called
by `engine/sampler`, `engine/runner` and `engine/delivery`.

S rows, V vocabulary, k likeliest tokens that are told of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

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
    top_ids = map(int, values[1 + num_top :])
    return TokenLogprob(
        token_id, values[0], tuple(zip(top_ids, values[1 : 1 + min(num_wanted, num_top)], strict=False))
    )


@dataclass(frozen=True)
class PackedPart:
    """What one step gave for the next tokens of a prompt.

    Attributes:
        num_tokens: of the prompt.
        scored: places in the prompt of those that are no placeholders of media, in order.
        rows: [len(scored), 1 + 2k] float64 on the host, as `pack_logprobs` lays them out.
        num_top: likeliest tokens that the request asks for.
    """

    num_tokens: int
    scored: Sequence[int]
    rows: Tensor
    num_top: int


class PromptEntries(Collection["TokenLogprob | None"]):
    """Those of a whole prompt, made anew whenever they are iterated over, by whoever does.

    Args:
        token_ids: [P], the prompt's.
        parts: in order; what they leave out has no log probability.
    """

    def __init__(self, token_ids: Sequence[int], parts: Sequence[PackedPart]) -> None:
        self._token_ids = token_ids
        self._parts = parts

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        end = 0
        for part in self._parts:
            for place, values in zip(part.scored, part.rows.tolist(), strict=True):
                yield from repeat(None, place - end)
                yield unpack_logprob(values, self._token_ids[place], part.num_top)
                end = place + 1
        yield from repeat(None, len(self) - end)

    def __contains__(self, entry: object) -> bool:
        return any(each == entry for each in self)


class PromptLogprobs:
    """Those of the prompt tokens of one step, on their way to the host.

    Args:
        packed: [S, 1 + 2k] float64, as `pack_logprobs` lays them out; the rows of all parts, in order. None where S is 0.
        parts: whose they are.
    """

    def __init__(self, packed: Tensor | None, parts: Sequence[PromptPart]) -> None:
        self._packed = None if packed is None else HostCopy(packed)
        self._parts = parts

    def read(self) -> Iterator[tuple[RequestState, PackedPart]]:
        """For each request those of its next prompt tokens; waits until the device has them."""
        packed = torch.empty(0, 1, dtype=torch.float64) if self._packed is None else self._packed.read()
        start = 0
        for part in self._parts:
            end = start + len(part.scored)
            # A copy, as a view would keep the step's memory, which on a GPU is page-locked, until an answer is read.
            yield part.state, PackedPart(part.end - part.start, part.scored, packed[start:end].clone(), part.num_top)
            start = end
