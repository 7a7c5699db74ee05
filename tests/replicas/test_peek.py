"""What a body tells about the adapter that will answer it."""

from __future__ import annotations

import httpx
import orjson
import pytest

from deploy.replicas.peek import FormPeek, ModelNames, json_adapter

NAMES = ModelNames(["base"], {"audio": "speech"})
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


@pytest.mark.parametrize(
    ("body", "adapter"),
    [
        ({"model": "sql"}, "sql"),
        ({"model": "base"}, None),
        ({"model": "base", "lora": "sql"}, "sql"),
        ({"model": "sql", "lora": "none"}, None),
        ({"lora": "auto"}, None),
        ({"model": "sql", "lora": "pirate"}, None),  # refused by the replica
        ({"model": "base", "messages": [{"role": "user", "content": [AUDIO]}]}, "speech"),
        ({"model": "base", "lora": "none", "messages": [{"role": "user", "content": [AUDIO]}]}, None),
        ({"model": "base", "messages": [{"role": "user", "content": "input_audio"}]}, None),
        ({"model": 3, "messages": [3, {"content": [3]}]}, None),
        ([], None),
    ],
)
def test_a_json_body_names_its_adapter(body: object, adapter: str | None) -> None:
    assert json_adapter(orjson.dumps(body), NAMES) == adapter


def test_what_is_not_json_names_none() -> None:
    assert json_adapter(b"{", NAMES) is None
    assert json_adapter(b"", NAMES) is None


def form_of(fields: dict[str, str], file: bytes) -> tuple[bytes, str]:
    request = httpx.Request("POST", "http://h/", data=fields, files={"file": ("model.wav", file)})
    return request.read(), request.headers["content-type"]


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_form_names_its_adapter_in_whatever_pieces_it_comes(step: int) -> None:
    body, content_type = form_of({"model": "base", "lora": "sql", "prompt": "model"}, b"\r\n--x\r\n" * 100)
    form = FormPeek(content_type)
    for start in range(0, len(body), step):
        form.feed(body[start : start + step])
    assert form.is_form and form.adapter(NAMES) == "sql"


def test_a_form_without_a_name_is_a_recording_for_the_default() -> None:
    body, content_type = form_of({"model": "base"}, b"RIFF")
    form = FormPeek(content_type)
    form.feed(body)
    assert form.adapter(NAMES) == "speech"


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=x"]
)
def test_what_is_no_form_is_left_alone(content_type: str) -> None:
    form = FormPeek(content_type)
    form.feed(b"not a form at all")
    assert not form.is_form


def test_a_name_of_any_length_is_not_kept() -> None:
    body, content_type = form_of({"model": "x" * 100_000}, b"")
    form = FormPeek(content_type)
    for start in range(0, len(body), 1000):
        form.feed(body[start : start + 1000])
    adapter = form.adapter(NAMES)
    assert adapter is not None and len(adapter) < 5000


def test_what_cannot_be_a_boundary_or_a_name_is_the_replicas_to_refuse() -> None:
    form = FormPeek(f"multipart/form-data; boundary={'x' * 300}")
    form.feed(b"anything")
    assert not form.is_form
    assert json_adapter(b'{"lora": "%b"}' % (b"x" * 5000), NAMES) is None
