"""The client of `stream_cost`: many streams at a time, read without an HTTP library, which would cost more than the server.

`python -m benchmarks.stream_client PORT STREAMS REQUEST` asks until its input ends, checks each answer, and prints counts.
Nothing but the standard library is imported, so that it is under way at once.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

END_OF_BODY = b"\r\n0\r\n\r\n"  # of a chunked one


def request_of(path: str, body: dict[str, object]) -> bytes:
    """A request whose connection stays open."""
    content = json.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return (head + content).encode()


async def read_answer(reader: asyncio.StreamReader) -> list[tuple[float, bytes]]:
    """What was read of a stream up to its end, and when. Raises RuntimeError where it is refused or ends early."""
    reads: list[tuple[float, bytes]] = []
    tail = b""
    while tail != END_OF_BODY:
        data = await reader.read(1 << 16)
        reads.append((time.perf_counter(), data))
        if not data or not reads[0][1].startswith(b"HTTP/1.1 200"):
            rest = await reader.read(1 << 16)
            raise RuntimeError(
                f"the server refused or ended an answer: {(b''.join(part for _, part in reads) + rest)[-600:]!r}"
            )
        tail = (tail + data)[-len(END_OF_BODY) :]
    return reads


async def main(port: int, num_streams: int, path: str, body: dict[str, object], output_lens: tuple[int, int]) -> None:
    """Ask for answers of lengths from the least to the most, and print."""
    is_over = asyncio.Event()
    counts = {"answers": 0, "chunks": 0, "reads": 0}
    until = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    until.add_done_callback(lambda _: is_over.set())
    lengths = random.Random(0)

    async def lane() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while not is_over.is_set():
            num_tokens = lengths.randint(*output_lens)
            writer.write(request_of(path, {**body, "max_tokens": num_tokens}))
            reads = await read_answer(reader)
            text = b"".join(data for _, data in reads)
            if f'"completion_tokens":{num_tokens},'.encode() not in text or b"data: [DONE]" not in text:
                raise RuntimeError(f"an answer is not whole: {text[-300:]!r}")
            counts["answers"] += 1
            counts["chunks"] += text.count(b"data: ")
            counts["reads"] += len(reads)
        writer.close()

    sys.stdout.write("under way\n")
    sys.stdout.flush()
    await asyncio.gather(*(lane() for _ in range(num_streams)))
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), *json.loads(sys.argv[3])))
