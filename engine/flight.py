"""The tokens that the latest step sampled, kept on the device for the step that follows.

A decode step needs the token before it, which the host need not know yet: the next step is built and launched while the
device still computes, and takes its tokens from here. Written by `engine/runner`, read there and in recorded graphs.

R sampled rows, T packed tokens.
"""

from __future__ import annotations

import torch


class FlightTokens:
    """A buffer at a fixed address, so that recorded graphs find it; room for `max_num_seqs` rows."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    @property
    def memory(self) -> torch.Tensor:
        """[max_num_seqs] int64, at an address that stays."""
        return self._token_ids

    def keep(self, token_ids: torch.Tensor) -> None:
        """Remember a step's [R] int64 tokens; an invalid one (-1), whose request is about to fail, becomes token 0."""
        torch.clamp(token_ids, min=0, out=self._token_ids[: token_ids.shape[0]])

    def fill_in(self, token_ids: torch.Tensor, flight_rows: torch.Tensor) -> torch.Tensor:
        """[T] int64: `token_ids`, and where `flight_rows` is not -1 the token of that row."""
        return torch.where(flight_rows < 0, token_ids, self._token_ids[flight_rows.clamp(min=0)])
