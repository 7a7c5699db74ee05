"""`echo` with `logprobs`: log probabilities of the prompt's own tokens, as evaluation programs read them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from api.logprobs import TokenTexts
from engine import Engine, SamplingParams
from engine.request import TokenLogprob, TokenPrompt
from tests.conftest import SPEECH
from tests.oracles import Oracle, random_ids

PROMPT = "Once upon a time"
CUT = "Gr\u00fc\u00dfe \N{SNOWMAN}!"  # Some of its characters are two or three tokens.


def score(client: openai.OpenAI, model: str, prompt: Any, **fields: Any) -> Any:
    """What evaluation programs send, unless `fields` say otherwise."""
    sent = {"echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0, **fields}
    return client.completions.create(model=model, prompt=prompt, extra_body={"ignore_eos": True}, **sent)


@pytest.fixture(scope="module")
def oracle(speech_dir: Path, speech_adapters: dict[str, Path]) -> Oracle:
    return Oracle(speech_dir, SPEECH, speech_adapters)


def true_logprobs(oracle: Oracle, token_ids: list[int], adapter: str | None) -> list[float]:
    rows = oracle.logits(token_ids, adapter)[:-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompts_are_scored_as_transformers_scores_them(
    client: openai.OpenAI, base_model: str, oracle: Oracle, max_tokens: int
) -> None:
    prompts = [random_ids(length, length) for length in (1, 9, 40)]
    scores = {}
    for model, adapter in ((base_model, None), ("style", "style"), ("speech", "speech")):
        answer = score(client, model, prompts, max_tokens=max_tokens)
        assert answer.usage.completion_tokens == 3 * max_tokens and answer.usage.prompt_tokens == 50
        scores[model] = []
        for choice, prompt in zip(answer.choices, prompts, strict=True):
            logprobs = choice.logprobs
            assert choice.finish_reason == "length"
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            found = logprobs.token_logprobs[1 : len(prompt)]
            assert found == pytest.approx(true_logprobs(oracle, prompt, adapter), abs=1e-4)
            lens = {len(values) for values in (logprobs.tokens, logprobs.top_logprobs, logprobs.text_offset)}
            assert lens == {len(logprobs.token_logprobs)} == {len(prompt) + max_tokens}
            scores[model].append(found)
    assert scores[base_model] != scores["style"] != scores["speech"]


def test_the_object_covers_prompt_and_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    fields = {"n": 2, "max_tokens": 5, "logprobs": 2}
    whole = score(client, "style", [CUT, PROMPT], **fields)
    assert whole.usage.completion_tokens == 20 and whole.usage.prompt_tokens == len(CUT.encode()) + len(PROMPT)
    chunks = list(score(client, "style", [CUT, PROMPT], stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[0].lora["name"] == "style" and chunks[-1].usage == whole.usage
    for index, prompt in enumerate([CUT, CUT, PROMPT, PROMPT]):
        expected = whole.choices[index]
        assert expected.text.startswith(prompt)
        num_prompt = len(prompt.encode())
        parts = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert "".join(part.text for part in parts) == expected.text
        assert parts[-1].finish_reason == expected.finish_reason == "length"
        (echoed,) = [part for part in parts if part.text == prompt]
        assert len(echoed.logprobs.tokens) == num_prompt, "the prompt has a chunk of its own"
        logprobs = [part.logprobs for part in parts if part.logprobs]
        for name in ("tokens", "text_offset"):
            found = [value for each in logprobs for value in getattr(each, name)]
            assert found == getattr(expected.logprobs, name)
        values = [value for each in logprobs for value in each.token_logprobs]
        assert values[0] is None and len(values) == num_prompt + 5
        assert values[1:] == pytest.approx(expected.logprobs.token_logprobs[1:], abs=1e-4)
        assert [rivals is None for each in logprobs for rivals in each.top_logprobs] == [True] + [False] * (
            len(values) - 1
        )


def test_offsets_are_places_in_the_text_that_comes_back(client: openai.OpenAI, base_model: str) -> None:
    (choice,) = score(client, base_model, CUT, max_tokens=4).choices
    assert choice.logprobs.text_offset[: len(CUT.encode())] == [
        place for place, character in enumerate(CUT) for _ in character.encode()
    ]
    for token, start in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert token == "\ufffd" or choice.text[start:].startswith(token)
    (choice,) = score(client, base_model, random_ids(50, 7)).choices  # Bytes that are no text.
    starts = choice.logprobs.text_offset
    assert starts == sorted(starts) and starts[0] == 0 and starts[-1] == len(choice.text) - 1


def test_a_greedy_answer_is_the_likeliest_when_it_is_scored(
    client: openai.OpenAI, tiny_engine: Engine, base_model: str
) -> None:
    """How evaluation programs find out whether the model would say what they score: by equal numbers."""
    prompt, sampling = random_ids(20, 6), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for model, lora in ((base_model, "none"), ("style", "style")):
        (answer,) = tiny_engine.start_sync(TokenPrompt(prompt), sampling, lora=lora)
        tokens = [token_id for delta in answer for token_id in delta.token_ids]
        logprobs = score(client, model, prompt + tokens).choices[0].logprobs
        is_likeliest = [
            value == max(rivals.values())
            for value, rivals in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
        ]
        assert all(is_likeliest[19:]) and not all(is_likeliest[:19])


def test_stop_strings_act_on_the_answer_alone(client: openai.OpenAI, base_model: str) -> None:
    text = score(client, base_model, PROMPT, max_tokens=8).choices[0].text.removeprefix(PROMPT)
    (choice,) = score(client, base_model, PROMPT, max_tokens=8, stop=["upon", text[3:5]]).choices
    assert (choice.text, choice.finish_reason) == (PROMPT + text[:3], "stop")
    assert len(choice.logprobs.tokens) < len(PROMPT) + 8
    (choice,) = score(client, base_model, PROMPT, stop=["upon"]).choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_no_tokens_give_the_prompt_alone(http: httpx.Client, base_model: str, is_streamed: bool) -> None:
    body = {"model": base_model, "prompt": [PROMPT, CUT], "echo": True, "max_tokens": 0, "stream": is_streamed}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    if not is_streamed:
        choices = answer.json()["choices"]
        assert [choice["text"] for choice in choices] == [PROMPT, CUT]
        assert {(choice["logprobs"], choice["finish_reason"]) for choice in choices} == {(None, "length")}
        assert answer.json()["usage"]["completion_tokens"] == 0
        return
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    for index, prompt in enumerate([PROMPT, CUT]):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == prompt and mine[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"echo": False, "logprobs": 1}])
def test_no_tokens_without_echo_are_refused(http: httpx.Client, base_model: str, fields: dict[str, Any]) -> None:
    answer = http.post("/v1/completions", json={"model": base_model, "prompt": "hi", "max_tokens": 0, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens" and "echo" in answer.json()["error"]["message"]


class Words:
    """A vocabulary as SentencePiece's: a word has the space before it, and the tokenizer adds one before a text."""

    all_special_ids = (0, 1)
    words = ("<s>", "</s>", "\u2581Hello", "\u2581world", "!", "<0xC3>", "<0xBC>")

    def convert_ids_to_tokens(self, ids: int) -> str:
        return self.words[ids]

    def __len__(self) -> int:
        return len(self.words)


def test_what_the_tokenizer_puts_before_a_text_takes_no_room_in_it() -> None:
    tokens = TokenTexts(Words())
    rest: list[TokenLogprob | None] = [TokenLogprob(token_id, -0.5, ((1, -0.1),)) for token_id in (2, 3, 4, 5, 6)]
    found = tokens.prompt([0, 2, 3, 4, 5, 6], [None, *rest], "Hello world!\u00fc")
    assert found["text_offset"] == [0, 0, 5, 11, 12, 12]
    assert found["tokens"] == ["<s>", " Hello", " world", "!", "\ufffd", "\ufffd"]
    assert found["token_logprobs"] == [None, *[-0.5] * 5] and found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {"</s>": -0.1, " Hello": -0.5}
    assert tokens.prompt([0, 2, 1], [None] * 3, "<s> Hello</s>")["text_offset"] == [0, 3, 9]
    # Both pieces of the character look alike, and the likelier one must show.
    assert tokens.prompt([0, 5], [None, TokenLogprob(5, -3.0, ((6, -0.2),))], "\u00fc")["top_logprobs"][1] == {
        "\ufffd": -0.2
    }


def test_a_token_id_is_decoded_once() -> None:
    decoded: Counter[int] = Counter()

    class Counted(Words):
        def convert_ids_to_tokens(self, ids: int) -> str:
            decoded[ids] += 1
            return super().convert_ids_to_tokens(ids)

    tokens = TokenTexts(Counted())
    decoded.clear()
    entries = [TokenLogprob(token_id, -0.5, ((2, -0.1), (5, -0.2))) for token_id in (3, 4, 5, 3)]
    for _ in range(2):
        assert tokens.prompt([3, 4, 5, 3], entries, " world!")["tokens"] == [" world", "!", "\ufffd", " world"]
        assert tokens.chat(entries)["content"][2]["bytes"] == [0xC3]
        assert tokens.completion(entries, 0)["text_offset"] == [0, 6, 7, 8]
    assert decoded == {2: 1, 3: 1, 4: 1, 5: 1}


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, -2e4])
def test_what_json_cannot_say_is_told_as_the_least(value: float) -> None:
    """A token that the model cannot say; whole answers and streams have one form for it."""
    tokens, entries = TokenTexts(Words()), [TokenLogprob(2, value, ((3, value), (4, -1.5)))]
    rivals = {" world": -9999.0, "!": -1.5, " Hello": -9999.0}
    for found in (tokens.prompt([2], entries, " Hello"), tokens.completion(entries, 0)):
        assert (found["token_logprobs"], found["top_logprobs"]) == ([-9999.0], [rivals])
    (entry,) = tokens.chat(entries)["content"]
    assert [entry["logprob"], *(rival["logprob"] for rival in entry["top_logprobs"])] == [-9999.0, -9999.0, -1.5]


def test_prompts_and_whole_answers_are_spelled_off_the_event_loop(
    http: httpx.Client, base_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes long where they are long, and everyone's streams wait for the loop."""
    is_on_loop: list[tuple[str, bool]] = []

    def watch(name: str) -> None:
        spell = getattr(TokenTexts, name)

        def watched(*arguments: Any) -> Any:
            is_on_loop.append((name, asyncio._get_running_loop() is not None))
            return spell(*arguments)

        monkeypatch.setattr(TokenTexts, name, watched)

    for name in ("prompt", "completion", "chat"):
        watch(name)
    ask = {"model": base_model, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    scored = {**ask, "prompt": [PROMPT, CUT], "echo": True, "logprobs": 1}
    assert http.post("/v1/completions", json=scored).status_code == 200
    assert Counter(is_on_loop) == {("prompt", False): 2, ("completion", False): 2}
    is_on_loop.clear()
    assert http.post("/v1/completions", json={**scored, "stream": True}).status_code == 200
    assert [each for each in is_on_loop if each[0] == "prompt"] == [("prompt", False)] * 2
    is_on_loop.clear()
    chat = {**ask, "messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert is_on_loop == [("chat", False)]


def test_of_rivals_with_one_text_the_likeliest_shows() -> None:
    entry = TokenLogprob(2, -3.0, ((5, -0.1), (3, -0.2), (6, -0.3)))
    assert TokenTexts(Words()).completion([entry], 0)["top_logprobs"] == [
        {"\ufffd": -0.1, " world": -0.2, " Hello": -3.0}
    ]
