"""Adapters' own tokenizers are made once for all who wait, and nobody else waits meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

import pytest

import engine.adapter_text as adapter_text
from engine.adapter_text import AdapterTexts, TextSide
from engine.errors import InvalidRequest


class Content:
    """What is read of a generation."""

    def __init__(self, number: int) -> None:
        files = {"tokenizer.json": b"%d" % number}
        self.extras = SimpleNamespace(tokenizer_files=files, num_added_tokens=1)


class Workshop:
    """Stands in for making a text side, which takes until it is let go on."""

    def __init__(self) -> None:
        self.made: list[bytes] = []
        self.may_go_on = threading.Event()

    def make(self, files: dict[str, bytes], num_added: int) -> TextSide:
        assert self.may_go_on.wait(120)
        content = files["tokenizer.json"]
        self.made.append(content)
        if content == b"13":
            raise InvalidRequest("It cannot be read.")
        return TextSide(content, None, None, frozenset(), num_added)  # type: ignore[arg-type]


@pytest.fixture
def workshop() -> Workshop:
    return Workshop()


@pytest.fixture
def texts(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdapterTexts]:
    texts = AdapterTexts(TextSide(None, None, None, frozenset(), 0), None, [])  # type: ignore[arg-type]
    monkeypatch.setattr(texts, "_make", workshop.make)
    yield texts
    workshop.may_go_on.set()
    texts.close()


def soon(texts: AdapterTexts, content: Any) -> Future[TextSide]:
    return texts.soon(content)


def test_what_is_at_hand_is_given_while_others_are_made(texts: AdapterTexts, workshop: Workshop) -> None:
    ready, slow = Content(0), Content(1)
    workshop.may_go_on.set()
    side = soon(texts, ready).result(60)
    workshop.may_go_on.clear()
    waiting = [soon(texts, slow) for _ in range(40)]
    assert soon(texts, ready).result(0) is side and soon(texts, None).result(0) is texts.base
    assert not any(future.done() for future in waiting)
    assert waiting.pop().cancel()
    workshop.may_go_on.set()
    assert {future.result(60).tokenizer for future in waiting} == {b"1"}
    assert workshop.made == [b"0", b"1"]


def test_a_burst_over_many_adapters_makes_each_once_while_they_are_in_use(
    texts: AdapterTexts, workshop: Workshop
) -> None:
    workshop.may_go_on.set()
    contents = [Content(100 + number) for number in range(20)]
    futures = [soon(texts, content) for _ in range(3) for content in contents]
    assert not wait(futures, 60).not_done
    in_use = [future.result() for future in futures]
    assert sorted(workshop.made) == sorted(content.extras.tokenizer_files["tokenizer.json"] for content in contents)
    for content in contents:
        soon(texts, content).result(60)
    assert len(workshop.made) == 20
    del futures, in_use
    for content in contents:
        soon(texts, content).result(60)
    assert 20 < len(workshop.made) <= 40  # Only the ones that were used last are kept without being used.


def test_files_are_hashed_once_for_each_version(texts: AdapterTexts, workshop: Workshop, monkeypatch: Any) -> None:
    workshop.may_go_on.set()
    digest, hashed = adapter_text._digest, []
    monkeypatch.setattr(adapter_text, "_digest", lambda files, num: hashed.append(files) or digest(files, num))
    content = Content(0)
    assert soon(texts, content).result(60) is soon(texts, content).result(60)
    assert len(hashed) == 1


def test_a_tokenizer_that_cannot_be_made_fails_those_who_wait_and_is_tried_again(
    texts: AdapterTexts, workshop: Workshop
) -> None:
    content = Content(13)
    futures = [soon(texts, content) for _ in range(3)]
    workshop.may_go_on.set()
    for future in futures:
        with pytest.raises(InvalidRequest):
            future.result(60)
    with pytest.raises(InvalidRequest):
        soon(texts, content).result(60)
    assert workshop.made == [b"13", b"13"]


def test_after_the_end_it_is_made_in_person(texts: AdapterTexts, workshop: Workshop) -> None:
    workshop.may_go_on.set()
    texts.close()
    assert soon(texts, Content(5)).result(0).tokenizer == b"5"
