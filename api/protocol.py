"""Which of uvicorn's HTTP parsers serves: httptools, whose parser in C takes a third off what a token of a stream costs.

uvicorn bounds what a client may send outside of bodies for h11 alone, so the bound for httptools is here. Used by `app.py`.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 1024
"""Of a request outside its body: request line, headers, trailers."""
_FRAMING_SHARE = 16
"""Bytes of framing for one of the body: more than chunks of one byte need."""


class BoundedProtocol(HttpToolsProtocol):
    """Answers 400 and hangs up where a request's head, framing or trailers go on without end."""

    _num_received = 0
    _num_in_bodies = 0
    _num_in_piece = 0  # of the bytes being parsed, without what of them was bodies

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the socket."""
        self._num_received += len(data)
        self._num_in_piece = len(data)
        super().data_received(data)
        is_open = not self.transport.is_closing()
        if is_open and self._num_received - self._num_in_bodies > HEAD_BYTES + _FRAMING_SHARE * self._num_in_bodies:
            self.send_400_response("The request's headers are too long.")

    def on_message_begin(self) -> None:
        """Count anew for the next request, whose head may end in the piece in which it begins."""
        self._num_received, self._num_in_bodies = self._num_in_piece, 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body in."""
        self._num_in_bodies += len(body)
        self._num_in_piece -= len(body)
        super().on_body(body)
