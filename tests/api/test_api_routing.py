"""Every row of the routing rule, for every way in which media can arrive, streamed or not, on a model that takes both kinds.

The expected routes are written out here; nothing is taken from the code under test.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from api.settings import ServerSettings
from engine import LLM, LoRARequest, SamplingParams
from engine.config import LoRAModule
from engine.errors import AppError
from tests.api.conftest import serve
from tests.media_models import HAS_OMNI, OMNI, picture
from tests.oracles import make_adapter, make_model, tone

if not HAS_OMNI:
    pytest.skip("the model needs a newer transformers", allow_module_level=True)

Media = frozenset[str]
TEXT, AUDIO, IMAGE, BOTH = (frozenset(kinds) for kinds in ((), ("audio",), ("image",), ("audio", "image")))
TWO = {"audio": "speech", "image": "vision"}
CONFLICT = (None, "conflict:audio=speech,image=vision")


@dataclass(frozen=True)
class Row:
    """A request's names and the server's defaults, with the route that each set of media leads to; a number is a status."""

    name: str
    model: str | None
    lora: str | None
    defaults: Mapping[str, str]
    routes: Mapping[Media, tuple[str | None, str] | int]

    def __str__(self) -> str:
        return self.name


def everywhere(route: tuple[str | None, str] | int) -> dict[Media, tuple[str | None, str] | int]:
    return dict.fromkeys((TEXT, AUDIO, IMAGE, BOTH), route)


BY_DEFAULT = {
    TEXT: (None, "base"),
    AUDIO: ("speech", "default:audio"),
    IMAGE: ("vision", "default:image"),
    BOTH: CONFLICT,
}
ROWS = [
    Row("named by model", "other", None, TWO, everywhere(("other", "explicit"))),
    Row("named by lora", None, "other", TWO, everywhere(("other", "explicit"))),
    Row("named by both", "other", "other", TWO, everywhere(("other", "explicit"))),
    Row("a default named", "speech", None, TWO, everywhere(("speech", "explicit"))),
    Row("no defaults", None, None, {}, everywhere((None, "base"))),
    Row("two defaults", None, None, TWO, BY_DEFAULT),
    Row("two defaults, auto", None, "auto", TWO, BY_DEFAULT),
    Row(
        "one adapter for both", None, None, {"audio": "joint", "image": "joint"},
        {
            TEXT: (None, "base"), AUDIO: ("joint", "default:audio"), IMAGE: ("joint", "default:image"),
            BOTH: ("joint", "default:audio+image"),
        },
    ),
    Row(
        "a default for audio alone", None, None, {"audio": "speech"},
        {TEXT: (None, "base"), AUDIO: ("speech", "default:audio"), IMAGE: (None, "base"), BOTH: ("speech", "default:audio")},
    ),
    Row("opt-out", None, "none", TWO, everywhere((None, "opt-out"))),
    Row("unknown model", "nobody", None, TWO, everywhere(404)),
    Row("unknown lora", None, "nobody", TWO, everywhere(404)),
    Row("names that differ", "other", "speech", TWO, everywhere(400)),
    Row(
        "a default that is gone", None, None, {"audio": "gone"},
        {TEXT: (None, "base"), AUDIO: 404, IMAGE: (None, "base"), BOTH: 404},
    ),
]  # fmt: skip


def _wav() -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, tone(0.2), 16_000, format="WAV")
    return buffer.getvalue()


def _png() -> bytes:
    buffer = io.BytesIO()
    picture().save(buffer, "PNG")
    return buffer.getvalue()


def _part(kind: str) -> dict[str, Any]:
    sound, image = base64.b64encode(_wav()).decode(), base64.b64encode(_png()).decode()
    parts: dict[str, dict[str, Any]] = {
        "text": {"text": "what?"},
        "input_audio": {"input_audio": {"data": sound, "format": "wav"}},
        "audio_url": {"audio_url": {"url": f"data:audio/wav;base64,{sound}"}},
        "image_url": {"image_url": {"url": f"data:image/jpeg;base64,{image}", "detail": "auto"}},
    }
    return {"type": kind, **parts[kind]}


def _turns(*turns: str) -> list[dict[str, Any]]:
    """A user's turn for each string of part types, with answers between them."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages += [{"role": "assistant", "content": "Yes."}] if messages else []
        messages.append({"role": "user", "content": [_part(kind) for kind in turn.split()]})
    return messages


CHATS: dict[str, tuple[Media, list[dict[str, Any]]]] = {
    "text": (TEXT, [{"role": "user", "content": "what?"}]),
    "input_audio": (AUDIO, _turns("text input_audio")),
    "audio_url": (AUDIO, _turns("audio_url text")),
    "image_url": (IMAGE, _turns("image_url text")),
    "audio and image": (BOTH, _turns("input_audio text image_url")),
    "audio of an earlier turn": (AUDIO, _turns("input_audio", "text")),
    "image of an earlier turn": (IMAGE, _turns("text image_url", "text", "text")),
    "image now, audio earlier": (BOTH, _turns("audio_url", "image_url text")),
}
PLACEHOLDERS = {"audio": "<|audio_bos|><|audio|><|audio_eos|>", "image": "<|begin|><|image|><|end|>"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    root = tmp_path_factory.mktemp("routing")
    folder = make_model(OMNI, root / "omni")
    adapters = {
        name: make_adapter(
            folder, OMNI, root / name, targets=r".*language_model.*\.(q_proj|o_proj)", seed=seed, std=0.4
        )
        for seed, name in enumerate(("speech", "vision", "joint", "other"), 20)
    }
    llm = LLM(
        model=str(folder), lora_modules=[LoRAModule(name, str(path)) for name, path in adapters.items()],
        default_mm_loras=TWO, max_loras=4, max_lora_rank=8, max_model_len=500, adapter_dir=str(root / "catalogue"),
    )  # fmt: skip
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def http(llm: LLM) -> Iterator[httpx.Client]:
    with serve(llm.engine, ServerSettings()) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def set_defaults(llm: LLM) -> Iterator[Callable[[Mapping[str, str]], None]]:
    adapters, speech = llm.engine.adapters, llm.engine.adapters.get("speech").source

    def change(to: Mapping[str, str]) -> None:
        if "gone" in to.values():
            adapters.load("gone", speech)
        for modality in ("audio", "image"):
            llm.engine.set_default(modality, to.get(modality))
        if "gone" in to.values():
            adapters.unload("gone")

    yield change
    change(TWO)


def _check(row: Row, media: Media, response: httpx.Response, is_stream: bool) -> None:
    """The status, or the route in body and headers."""
    expected = row.routes[media]
    if isinstance(expected, int):
        assert response.status_code == expected, response.text
        assert response.json()["error"]["message"]
        return
    assert response.status_code == 200, response.text
    if is_stream:
        first = next(line for line in response.text.splitlines() if line.startswith("data: "))
        body = json.loads(first.removeprefix("data: "))
    else:
        body = response.json()
    assert (body["lora"]["name"], body["lora"]["reason"]) == expected
    assert response.headers["x-lora-reason"] == expected[1]
    assert response.headers["x-lora-name"] == (expected[0] or "none")


def _names(row: Row, llm: LLM) -> dict[str, Any]:
    names = {"model": row.model or llm.engine.model_names[0]}
    return names if row.lora is None else {**names, "lora": row.lora}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("way", CHATS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_chat(
    row: Row, way: str, is_stream: bool, llm: LLM, http: httpx.Client,
    set_defaults: Callable[[Mapping[str, str]], None],
) -> None:  # fmt: skip
    set_defaults(row.defaults)
    media, messages = CHATS[way]
    body = {**_names(row, llm), "messages": messages, "max_tokens": 1, "stream": is_stream}
    _check(row, media, http.post("/v1/chat/completions", json=body), is_stream)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_completions_and_transcriptions(
    row: Row, is_stream: bool, llm: LLM, http: httpx.Client, set_defaults: Callable[[Mapping[str, str]], None]
) -> None:
    set_defaults(row.defaults)
    body = {**_names(row, llm), "prompt": "what?", "max_tokens": 1, "stream": is_stream}
    _check(row, TEXT, http.post("/v1/completions", json=body), is_stream)
    form = {**_names(row, llm), "max_completion_tokens": "1", "stream": str(is_stream).lower()}
    answer = http.post("/v1/audio/transcriptions", data=form, files={"file": ("a.bin", _wav())})
    _check(row, AUDIO, answer, is_stream)


@pytest.mark.parametrize("media", [TEXT, AUDIO, IMAGE, BOTH], ids=lambda media: "+".join(sorted(media)) or "text")
@pytest.mark.parametrize("row", [row for row in ROWS if row.model is None], ids=str)
def test_the_offline_api(row: Row, media: Media, llm: LLM, set_defaults: Callable[[Mapping[str, str]], None]) -> None:
    set_defaults(row.defaults)
    items: dict[str, Any] = {"audio": (tone(0.2), 16_000), "image": picture()}
    prompt = {
        "prompt": "".join(PLACEHOLDERS[kind] for kind in sorted(media)) + "what?",
        "multi_modal_data": {kind: items[kind] for kind in media},
    }
    parts = [{"type": kind, kind: items[kind]} for kind in sorted(media)]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
    sampling = SamplingParams(temperature=0, max_tokens=1)
    lora = None if row.lora in (None, "auto") else LoRARequest(row.lora, 1, "")
    for run in (
        lambda: llm.generate(prompt, sampling, lora_request=lora), lambda: llm.chat(messages, sampling, lora_request=lora)
    ):  # fmt: skip
        expected = row.routes[media]
        if isinstance(expected, int):
            with pytest.raises(AppError) as caught:
                run()
            assert 400 <= caught.value.status < 500
        else:
            [output] = run()
            assert (output.receipt.name, output.receipt.reason) == expected
            assert (output.lora_request and output.lora_request.lora_name) == expected[0]


def test_the_receipt_names_what_really_answered(llm: LLM, set_defaults: Callable[[Mapping[str, str]], None]) -> None:
    """Image alone, audio alone, both under one adapter, both under two: the tokens are those of the adapter that is named."""
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    sound, image = {"type": "audio", "audio": (tone(0.2), 16_000)}, {"type": "image", "image": picture()}

    def ask(parts: list[Any], lora: str | None) -> list[int]:
        request = None if lora is None else LoRARequest(lora)
        messages = [{"role": "user", "content": parts}]
        return llm.chat(messages, sampling, lora_request=request)[0].outputs[0].token_ids

    for parts, mapping, name in (
        ([image], TWO, "vision"), ([sound], TWO, "speech"), ([sound, image], {"audio": "joint", "image": "joint"}, "joint"),
        ([sound, image], TWO, "none"),
    ):  # fmt: skip
        by_name = {other: ask(parts, other) for other in ("none", "speech", "vision", "joint")}
        assert len(set(map(tuple, by_name.values()))) == 4, (
            "each adapter must answer differently, or this proves nothing"
        )
        set_defaults(mapping)
        assert ask(parts, None) == by_name[name]
