"""What Gradio keeps of pages that were closed, bounded.

Gradio holds the state of each page, the conversation and every component's last value, for up to 10,000 pages, closed ones
included. Called by `ui/app` when a visitor leaves; knows nothing of tabs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradio.state_holder import StateHolder

# The newest stay: a phone that lost its connection for a moment finds its conversation again.
MAX_CLOSED = 32


def forget_closed(holder: StateHolder, max_closed: int = MAX_CLOSED) -> int:
    """Drop the states of closed pages but for the `max_closed` that were used last; returns how many went."""
    with holder.lock:
        closed = [session for session, state in holder.session_data.items() if state.is_closed]
        forgotten = closed[: max(0, len(closed) - max_closed)]
        for session in forgotten:
            holder.session_data.pop(session, None)
            holder.time_last_used.pop(session, None)
    return len(forgotten)
