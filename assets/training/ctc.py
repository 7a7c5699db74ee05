"""Connectionist temporal classification as a function of tensors only, so that a CUDA graph can hold it.

torch's own CTC reads lengths on the host. `ctc_loss` here runs the forward-backward recursion in one Triton program
a sequence on CUDA; on the CPU it calls torch's.

Letters: `B` sequences, `T` frames, `V` symbols, `S` labels, `L = 2 S + 1` states (labels with blanks around them).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NEVER = -1e30


@triton.jit
def _log_add(a, b, c):  # type: ignore[no-untyped-def]
    top = tl.maximum(tl.maximum(a, b), c)
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top) + tl.exp(c - top))


@triton.jit
def _forward_backward(emit, skip, num_states, alpha, scratch, gamma, loss, T, L, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK)
    n = tl.load(num_states + b)
    m_state = s < n
    m_skip = tl.load(skip + b * L + s, mask=m_state, other=0) != 0
    m_skip_next = tl.load(skip + b * L + s + 2, mask=s + 2 < n, other=0) != 0
    emit += b * T * L
    alpha += b * T * L
    gamma += b * T * L
    scratch += b * 2 * L

    # alpha[t, s]: log probability of all ways to stand in state s after frame t.
    a = tl.where(m_state & (s < 2), tl.load(emit + s, mask=m_state, other=0.0), -1e30)
    tl.store(alpha + s, a, mask=s < L)
    for t in range(1, T):
        e = tl.load(emit + t * L + s, mask=m_state, other=0.0)
        tl.debug_barrier()
        one = tl.load(alpha + (t - 1) * L + s - 1, mask=m_state & (s >= 1), other=-1e30)
        two = tl.load(alpha + (t - 1) * L + s - 2, mask=m_state & (s >= 2) & m_skip, other=-1e30)
        a = tl.where(m_state, _log_add(a, one, two) + e, -1e30)
        tl.store(alpha + t * L + s, a, mask=s < L)

    m_end = m_state & (s >= n - 2)
    top = tl.max(tl.where(m_end, a, -1e30), axis=0)
    total = top + tl.log(tl.sum(tl.where(m_end, tl.exp(a - top), 0.0), axis=0))
    tl.store(loss + b, tl.where(total > -1e20, -total, 0.0))

    # beta[s]: log probability of all ways to go on from state s; gamma = posterior of the state.
    beta = tl.where(m_end, 0.0, -1e30)
    for back in range(T):
        t = T - 1 - back
        a = tl.load(alpha + t * L + s, mask=m_state, other=-1e30)
        posterior = tl.exp(tl.minimum(a + beta - total, 0.0))
        posterior = tl.where(m_state, tl.where(total > -1e20, posterior, 0.0), 0.0)
        tl.store(gamma + t * L + s, posterior, mask=s < L)
        q = beta + tl.load(emit + t * L + s, mask=m_state, other=0.0)
        q = tl.where(m_state, q, -1e30)
        row = scratch + (back % 2) * L
        tl.store(row + s, q, mask=s < L)
        tl.debug_barrier()
        one = tl.load(row + s + 1, mask=s + 1 < n, other=-1e30)
        two = tl.load(row + s + 2, mask=(s + 2 < n) & m_skip_next, other=-1e30)
        beta = tl.where(m_state, _log_add(q, one, two), -1e30)


class _StateLoss(torch.autograd.Function):
    """Loss of each sequence from its states' emissions [B, T, L] float32."""

    @staticmethod
    def forward(ctx, emit: Tensor, skip: Tensor, num_states: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        num_sequences, num_frames, width = emit.shape
        emit = emit.contiguous()
        alpha, gamma = torch.empty_like(emit), torch.empty_like(emit)
        scratch = emit.new_empty(num_sequences, 2, width)
        loss = emit.new_empty(num_sequences)
        block = triton.next_power_of_2(width)
        _forward_backward[(num_sequences,)](
            emit, skip, num_states, alpha, scratch, gamma, loss, num_frames, width, BLOCK=block,
            num_warps=1 if block <= 64 else 2 if block <= 256 else 4,
        )  # fmt: skip
        ctx.save_for_backward(gamma)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (gamma,) = ctx.saved_tensors
        return -gamma * grad[:, None, None], None, None


def ctc_loss(log_probs: Tensor, labels: Tensor, label_lens: Tensor, blank: int) -> Tensor:
    """Loss of each sequence, 0 where the labels do not fit into the frames.

    log_probs [B, T, V] float32; labels [B, S] int64, anything after each `label_lens` [B] int32; every sequence
    has all T frames. Returns [B] float32.
    """
    if not log_probs.is_cuda:
        frame_lens = torch.full_like(label_lens, log_probs.shape[1])
        return torch.nn.functional.ctc_loss(
            log_probs.transpose(0, 1), labels, frame_lens, label_lens, blank, reduction="none", zero_infinity=True
        )
    return state_loss(log_probs, labels, label_lens, blank)


def state_loss(log_probs: Tensor, labels: Tensor, label_lens: Tensor, blank: int) -> Tensor:
    """`ctc_loss` by the Triton recursion."""
    num_sequences, num_frames, _ = log_probs.shape
    states = labels.new_full((num_sequences, 2 * labels.shape[1] + 1), blank)
    states[:, 1::2] = labels
    skip = torch.zeros_like(states, dtype=torch.int32)
    skip[:, 2:] = ((states[:, 2:] != blank) & (states[:, 2:] != states[:, :-2])).int()
    emit = log_probs.gather(2, states[:, None, :].expand(-1, num_frames, -1))
    return _StateLoss.apply(emit, skip, 2 * label_lens + 1)
