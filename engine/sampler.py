"""The choice of the next token for each row of a step.

Owns the order in which sampling parameters act: logit bias, penalties, a guide's mask, then the likeliest token where
the temperature is 0; else temperature, top-k, top-p, min-p (the order of transformers' warpers) and one draw. A row's
outcome depends on its own logits, parameters and random numbers alone, never on the rest of the batch. Knows nothing of
requests' lives; the engine's runner calls it once a step.

Dimensions: R rows, P rows with a penalty, S rows that are drawn at random, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.errors import InvalidRequest
from engine.guides import Guide, apply_guides
from engine.logprobs import pack_logprobs, unpack_logprob
from engine.penalties import Penalties, has_penalties
from engine.request import SamplingParams, TokenLogprob
from engine.transfer import HostCopy, to_device

_WINDOW = 512
_MIN_SEARCHED = 2**16  # logits in a step from which finding the window first pays
INVALID_TOKEN = -1  # a row whose logits hold NaN or no finite value at all


@dataclass(eq=False)
class SamplerRow:
    """What the sampler knows of one request; made once and kept, since `output_token_ids` is read anew at each step.

    `generator` (see `make_generator`) belongs to a seeded row alone; rows without one share the sampler's.
    """

    params: SamplingParams
    generator: torch.Generator | None = None
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    guide: Guide | None = None
    has_edits: bool = field(init=False, repr=False)  # bias, penalties or a guide: the logits change
    reads_outputs: bool = field(init=False, repr=False)  # the choice needs all earlier tokens on the host
    is_plain: bool = field(
        init=False, repr=False
    )  # its token is the argmax of the raw logits, nothing else is asked for
    uniform: float | None = field(init=False, repr=False, default=None)  # drawn for a step that has not succeeded

    def __post_init__(self) -> None:
        params = self.params
        self.reads_outputs = has_penalties(params) or self.guide is not None
        self.has_edits = self.reads_outputs or bool(params.logit_bias)
        self.is_plain = params.temperature == 0.0 and params.logprobs is None and not self.has_edits


def make_generator(seed: int) -> torch.Generator:
    """The random numbers of a seeded request: on the CPU, so that a draw never waits for the device."""
    return torch.Generator(device="cpu").manual_seed(seed % 2**64)


def check_logit_bias(params: SamplingParams, vocab_size: int) -> None:
    """Refuse a `logit_bias` with an id outside the vocabulary or a value that is no finite number.

    Raises:
        InvalidRequest: names the entry.
    """
    for token_id, bias in (params.logit_bias or {}).items():
        if not 0 <= token_id < vocab_size:
            allowed = f"token ids are between 0 and {vocab_size - 1}"
            raise InvalidRequest(f"logit_bias holds token id {token_id}, but {allowed}.", param="logit_bias")
        if not -100.0 <= bias <= 100.0:
            message = f"logit_bias of token {token_id} is {bias}, but must be between -100 and 100."
            raise InvalidRequest(message, param="logit_bias")


class Choice:
    """The tokens of a step: on the device for the step that follows, and on their way to the host.

    Args:
        token_ids: [R] int64, `INVALID_TOKEN` for a row that holds NaN or nothing finite.
        logprobs: [W, 1 + 2k] float64 for the W rows that ask for them, as `pack_logprobs` lays them out.
        rows: the R rows.
    """

    def __init__(self, token_ids: Tensor, logprobs: Tensor | None, rows: Sequence[SamplerRow]) -> None:
        self.token_ids = token_ids
        self._rows = rows
        self._host_ids = HostCopy(token_ids)
        self._host_logprobs = None if logprobs is None else HostCopy(logprobs)

    def read(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Token ids and log probabilities of the raw logits, once the device has them."""
        chosen: list[int] = self._host_ids.read().tolist()
        packed = None if self._host_logprobs is None else self._host_logprobs.read().tolist()
        return chosen, _logprobs(packed, self._rows, chosen)


class Sampler:
    """Chooses tokens for batches of rows; `seed` feeds the rows that have no generator of their own."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._generator = make_generator(seed)
        self._penalties = Penalties(self._device)

    def sample(self, logits: Tensor, rows: Sequence[SamplerRow]) -> tuple[list[int], list[TokenLogprob | None]]:
        """`choose`, and wait for the result."""
        return self.choose(logits, rows).read()

    @torch.inference_mode()
    def choose(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Choice:
        """One token for each row, and its log probability where the row asks for it; never waits for the device.

        Where it raises, a later call for the same rows chooses as this one would have: no random number is lost.

        Args:
            logits: [R, V] float32, left as they are, and not needed after the call.
            rows: R rows in the order of `logits`.
        """
        assert logits.shape[0] == len(rows), (logits.shape, len(rows))
        if not rows:
            return Choice(torch.empty(0, dtype=torch.int64, device=logits.device), None, rows)
        highest, token_ids = likeliest(logits)
        is_valid = highest.isfinite()  # a NaN anywhere in a row is its maximum
        drawn: list[int] = []
        if not all(row.is_plain for row in rows):
            edited = self._edit(logits, rows)
            if edited is not logits:
                token_ids = likeliest(edited)[1]
            drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0.0]
            if drawn:
                token_ids = self._draw(edited, token_ids, rows, drawn)
        chosen = torch.where(is_valid, token_ids, INVALID_TOKEN)
        choice = Choice(chosen, _packed_logprobs(logits, rows, chosen), rows)
        for index in drawn:
            rows[index].uniform = None
        return choice

    def _edit(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Logits [R, V] with bias, penalties and guides applied; the very same tensor where no row has any."""
        edited_rows = [index for index, row in enumerate(rows) if row.has_edits]
        if not edited_rows:
            return logits
        logits = logits.clone()
        biases = [
            (index, token_id, bias)
            for index in edited_rows
            for token_id, bias in (rows[index].params.logit_bias or {}).items()
            if 0 <= token_id < logits.shape[1]  # check_logit_bias refuses others; here they must not break the batch
        ]
        if biases:
            row_ids, token_ids, values = zip(*biases, strict=True)
            place = (to_device(row_ids, torch.int64, logits.device), to_device(token_ids, torch.int64, logits.device))
            logits[place] += to_device(values, logits.dtype, logits.device)
        penalised = [index for index in edited_rows if has_penalties(rows[index].params)]
        if penalised:
            self._penalties.apply_(logits, rows, penalised)
        masks = {
            index: guide.allowed(rows[index].output_token_ids)
            for index in edited_rows
            if (guide := rows[index].guide) is not None
        }
        if masks:
            apply_guides(logits, list(masks), list(masks.values()))
        return logits

    def _draw(self, logits: Tensor, token_ids: Tensor, rows: Sequence[SamplerRow], drawn: list[int]) -> Tensor:
        """`token_ids` [R] with a random choice in the rows `drawn`.

        Rows with top-k or top-p are drawn from sorted probabilities, the others in vocabulary order: which way a row
        goes depends on its own parameters, so that a seed gives the same token in any batch.
        """
        uniforms = self._uniforms(rows, drawn)
        token_ids = token_ids.clone()
        vocab_size = logits.shape[-1]
        truncated = [_is_truncated(rows[index].params, vocab_size) for index in drawn]
        for needs_sort, draw in ((False, _draw_plain), (True, _draw_truncated)):
            picked = [position for position, is_truncated in enumerate(truncated) if is_truncated is needs_sort]
            if not picked:
                continue
            group = [drawn[position] for position in picked]
            params = [rows[index].params for index in group]
            settings = torch.tensor(
                [
                    (
                        uniforms[position],
                        param.temperature,
                        param.top_k if 0 < param.top_k < vocab_size else vocab_size,
                        param.top_p if param.top_p < 1.0 else math.inf,
                        math.log(param.min_p) if param.min_p > 0.0 else -math.inf,
                    )
                    for position, param in zip(picked, params, strict=True)
                ],
                dtype=torch.float64,
            )
            settings = to_device(settings, torch.float64, logits.device)
            index = to_device(group, torch.int64, logits.device)
            token_ids[index] = draw(logits[index], settings)
        return token_ids

    def _uniforms(self, rows: Sequence[SamplerRow], drawn: Sequence[int]) -> list[float]:
        """One number in [0, 1) for each row of `drawn`, from the row's own generator or the shared one."""
        shared: list[float] = torch.rand(len(drawn), generator=self._generator, dtype=torch.float64).tolist()
        for position, index in enumerate(drawn):
            row, generator = rows[index], rows[index].generator
            if generator is not None:
                assert generator.device.type == "cpu", "make_generator makes the generators of seeded rows"
                if row.uniform is None:
                    row.uniform = torch.rand(1, generator=generator, dtype=torch.float64).item()
                shared[position] = row.uniform
        return shared


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`logits.max(dim=-1)`: each row's maximum [R] and its first place [R]; a NaN counts as the maximum.

    On a CPU torch looks for a place one number at a time, but for a maximum alone many at once: so the window that
    holds the maximum is found first, and only that is searched.
    """
    vocab_size = logits.shape[1]
    if logits.device.type != "cpu" or vocab_size < 2 * _WINDOW or logits.numel() < _MIN_SEARCHED:
        highest, token_ids = logits.max(dim=-1)
        return highest, token_ids
    num_windows, last_start = vocab_size // _WINDOW, vocab_size - _WINDOW
    windows = logits[:, : num_windows * _WINDOW].unflatten(1, (num_windows, _WINDOW))
    # The last window overlaps the one before it where the vocabulary is no multiple.
    window = torch.cat([windows.amax(-1), logits[:, last_start:].amax(-1, keepdim=True)], 1).argmax(1, keepdim=True)
    start = (window * _WINDOW).clamp(max=last_start)
    highest, place = logits.gather(1, start + torch.arange(_WINDOW)).max(dim=-1)
    return highest, start.squeeze(1) + place


def _is_truncated(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits [S, V] over temperature [S, 1], with each row's maximum at 0 so that no temperature overflows."""
    divisor = temperature.to(logits.dtype).clamp(min=torch.finfo(logits.dtype).tiny)
    return (logits - logits.amax(dim=-1, keepdim=True)) / divisor


def _draw_plain(logits: Tensor, settings: Tensor) -> Tensor:
    """Token ids [S] of rows with neither top-k nor top-p. `settings` [S, 5] float64 as `Sampler._draw` builds it."""
    uniform, temperature, _, _, log_min_p = settings.unsqueeze(-1).unbind(1)
    scaled = _scaled(logits, temperature)
    weights = scaled.exp().masked_fill_(scaled < log_min_p, 0.0)
    return _pick(weights, uniform)


def _draw_truncated(logits: Tensor, settings: Tensor) -> Tensor:
    """Token ids [S] of rows with top-k or top-p."""
    uniform = settings[:, :1]
    weights, sorted_ids = truncated_weights(logits, settings)
    return sorted_ids.gather(-1, _pick(weights, uniform).unsqueeze(-1)).squeeze(-1)


def truncated_weights(logits: Tensor, settings: Tensor) -> tuple[Tensor, Tensor]:
    """Unnormalised probabilities [S, V] in falling order, 0 for tokens that are not kept, and their token ids [S, V].

    Kept are the k likeliest and all that equal the k-th; of these the shortest beginning whose probability reaches p;
    of these, those that have at least min-p times the likeliest one's. The likeliest token is always kept.
    """
    _, temperature, top_k, top_p, log_min_p = settings.unsqueeze(-1).unbind(1)
    scaled, sorted_ids = torch.sort(_scaled(logits, temperature), dim=-1, descending=True, stable=True)
    kth = scaled.gather(-1, top_k.long() - 1)
    weights = scaled.exp().masked_fill_(scaled < kth, 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    probability_before = (cumulative - weights) / cumulative[:, -1:]
    is_dropped = (probability_before >= top_p) | (scaled < log_min_p)
    return weights.masked_fill_(is_dropped, 0.0), sorted_ids


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Position [S] drawn from unnormalised `weights` [S, V] by inverting their distribution at `uniform` [S, 1].

    Sums in float64: over a large vocabulary float32 would move the likelier tokens' borders.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # Uniform numbers are at most 1 - 2^-53, so their product with the total is below it, and the first sum above the
    # product belongs to a weight that is not 0.
    target = uniform * cumulative[:, -1:]
    position = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return position.clamp_(max=weights.shape[-1] - 1)  # only a row of NaN gets past the end


def _packed_logprobs(logits: Tensor, rows: Sequence[SamplerRow], chosen: Tensor) -> Tensor | None:
    """`pack_logprobs` of the rows that ask for them."""
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return None
    num_top = max(rows[index].params.logprobs or 0 for index in wanted)
    index = to_device(wanted, torch.int64, logits.device)
    return pack_logprobs(logits[index], chosen[index].clamp(min=0), num_top)


def _logprobs(
    packed: list[list[float]] | None, rows: Sequence[SamplerRow], chosen: Sequence[int]
) -> list[TokenLogprob | None]:
    """What `_packed_logprobs` gave, for each row; None where a row did not ask, or has no token."""
    values_of = iter(packed or [])
    result: list[TokenLogprob | None] = []
    for row, token_id in zip(rows, chosen, strict=True):
        if row.params.logprobs is None:
            result.append(None)
            continue
        entry = unpack_logprob(next(values_of), token_id, row.params.logprobs)
        result.append(entry if token_id != INVALID_TOKEN else None)
    return result
