"""What a client may send outside of bodies has a bound, whatever else the connection is good for."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import pytest

from api.protocol import HEAD_BYTES

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
BODY = json.dumps({"model": "style", "prompt": "hello", "max_tokens": 1}).encode()


def connect(base_url: str) -> socket.socket:
    address = urlsplit(base_url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=60)


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server hangs up or has answered one request in full."""
    found = b""
    while piece := connection.recv(65536):
        found += piece
        head, _, body = found.partition(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if length and len(body) >= int(length[0].split(b":")[1]):
            break
    return found


def flood(connection: socket.socket, piece: bytes, *, until: int) -> int:
    """Send pieces until the server hangs up; returns how many bytes went."""
    sent = 0
    try:
        while sent < until:
            connection.sendall(piece)
            sent += len(piece)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        (b"", b"x" * 4096),
        (b"GET /health?", b"x" * 4096),
        (b"GET /health HTTP/1.1\r\nX-Long: ", b"x" * 4096),
        (b"GET /health HTTP/1.1\r\n", b"".join(b"x-%d: y\r\n" % number for number in range(500))),
        (HEAD + CHUNKED, b"1;" + b"x" * 4096 + b"\r\n{\r\n"),
        (HEAD + CHUNKED + b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY), b"x-trailer: " + b"y" * 4096 + b"\r\n"),
    ],
    ids=["method", "path", "header", "headers", "chunk extensions", "trailers"],
)  # fmt: skip
def test_heads_and_framing_without_end_are_cut_off(base_url: str, beginning: bytes, piece: bytes) -> None:
    with connect(base_url) as connection:
        connection.sendall(beginning)
        most = 512 * HEAD_BYTES  # what the system's own buffers may hold lies far below
        assert flood(connection, piece, until=most) < most


def test_a_head_below_the_bound_and_bodies_in_tiny_chunks_are_served_on_one_connection(base_url: str) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    for _ in range(3):
        with connect(base_url) as connection:
            for _ in range(3):
                connection.sendall(HEAD + b"X-Long: " + b"x" * (HEAD_BYTES - 4096) + b"\r\n")
                connection.sendall(CHUNKED + chunks + b"0\r\n\r\n")
                assert answer(connection).startswith(b"HTTP/1.1 200")


def test_a_large_body_is_no_head(base_url: str) -> None:
    body = json.dumps({"model": "style", "prompt": "hello " * 200_000, "max_tokens": 1}).encode()
    with connect(base_url) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        connection.sendall(body)
        found = answer(connection)
    assert found.startswith(b"HTTP/1.1 400") and b"tokens" in found


def test_a_head_that_comes_at_once_has_the_same_bound(base_url: str) -> None:
    for length, expected in ((HEAD_BYTES - 4096, b"200"), (HEAD_BYTES + 4096, b"400")):
        with connect(base_url) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\nX-Long: " + b"x" * length + b"\r\n\r\n")
            assert answer(connection).startswith(b"HTTP/1.1 " + expected)


def test_what_ends_a_large_body_is_not_counted_for_the_next_request(base_url: str) -> None:
    body = json.dumps({"model": "style", "prompt": "hello", "max_tokens": 1}).encode() + b" " * 150_000
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with connect(base_url) as connection:
        connection.sendall(request + b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        found = b""
        while piece := connection.recv(65536):
            found += piece
    assert found.count(b"HTTP/1.1 200") == 2
