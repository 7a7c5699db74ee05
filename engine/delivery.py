"""What a request's reader gets: its first event, and the text of each token until the answer ends.

Functions of one request's state; they end nothing and free nothing. Called by `engine/loop` on the engine thread, and by its
`submit` on callers' threads for the state itself.
"""

from __future__ import annotations

import dataclasses
import time

from engine.answer import Answer
from engine.detokenizer import DecodingTable, Detokenizer, StopMatcher
from engine.logprobs import PackedPart, PromptEntries
from engine.request import Delta, FinishReason, TokenLogprob
from engine.sampler import SamplerRow, make_generator
from engine.scheduler import PlanItem
from engine.state import EngineRequest, RequestState, Status


def make_state(request: EngineRequest, answer: Answer, decoding: DecodingTable) -> RequestState:
    """The mutable side of a request that was not queued yet."""
    sampling = request.sampling
    output_token_ids: list[int] = []
    return RequestState(
        request=request,
        answer=answer,
        sampler_row=SamplerRow(
            params=sampling,
            generator=None if sampling.seed is None else make_generator(sampling.seed),
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=output_token_ids,
            guide=request.guide,
        ),
        detokenizer=Detokenizer(
            decoding, skip_special_tokens=sampling.skip_special_tokens, shown_ids=request.shown_ids
        ),
        stop_matcher=StopMatcher(tuple(sampling.stop), include_stop=sampling.include_stop_str_in_output),
        token_ids=list(request.prompt_token_ids),
        output_token_ids=output_token_ids,
        # Nothing comes before the first token, so it has no log probability.
        num_scored=None if sampling.prompt_logprobs is None else 1,
    )


def first_delta(item: PlanItem) -> Delta:
    """The receipt of a request whose first step is `item`; its adapter hears of the prompt too."""
    state = item.state
    receipt = dataclasses.replace(
        state.request.receipt,
        queue_ms=(time.monotonic() - state.submitted_at) * 1000,
        cached_tokens=min(item.start, state.prompt_len),
    )
    if state.request.handle is not None:
        state.request.handle.note_prompt(state.prompt_len, receipt.cached_tokens)
    return Delta(receipt=receipt)


def take_prompt_logprobs(state: RequestState, part: PackedPart) -> None:
    """Keep those of the next prompt tokens until they are all known."""
    if state.num_scored is not None and state.status is not Status.FINISHED:
        state.num_scored += part.num_tokens
        state.scored_parts.append(part)


def only_prompt_delta(state: RequestState) -> Delta:
    """The end of an answer that has no tokens."""
    return Delta(finish_reason="length", prompt_logprobs=_prompt_logprobs(state))


def next_delta(state: RequestState, token_id: int, logprob: TokenLogprob | None) -> Delta:
    """The text that a token, which `state` has already, makes final; with a `finish_reason` where the answer ends by it.

    The first one has the log probabilities of the prompt too.
    """
    delta = _text_delta(state, token_id, logprob)
    if state.num_outputs > 1 or state.num_scored is None:
        return delta
    return delta._replace(prompt_logprobs=_prompt_logprobs(state))


def _prompt_logprobs(state: RequestState) -> PromptEntries:
    """They are the reader's from here on."""
    assert state.num_scored == state.prompt_len, "a prompt token was not scored, or twice"
    parts, state.scored_parts = state.scored_parts, []
    return PromptEntries(state.request.prompt_token_ids, parts)


def _text_delta(state: RequestState, token_id: int, logprob: TokenLogprob | None) -> Delta:
    logprobs = () if logprob is None else (logprob,)
    is_stop_token, stop_token = _is_stop_token(state, token_id)
    stop_reason: str | int | None = stop_token
    text, matched = "", None
    if not is_stop_token:
        text, matched = state.stop_matcher.push(state.detokenizer.push(token_id))
    reason: FinishReason | None = None
    if is_stop_token or matched is not None:
        reason = "stop"
        stop_reason = matched if matched is not None else stop_token
    elif state.num_outputs >= state.request.max_tokens:
        reason = "length"
    if reason is None:
        return Delta(text=text, token_ids=(token_id,), logprobs=logprobs)
    if matched is None:
        rest, late_match = state.stop_matcher.push(state.detokenizer.flush())
        text += rest
        if late_match is not None:
            reason, stop_reason = "stop", late_match
        else:
            text += state.stop_matcher.flush()
    return Delta(text, (token_id,), logprobs, reason, stop_reason)


def _is_stop_token(state: RequestState, token_id: int) -> tuple[bool, int | None]:
    sampling = state.request.sampling
    if token_id in sampling.stop_token_ids:
        return True, token_id
    return token_id in state.request.eos_token_ids and not sampling.ignore_eos, None
