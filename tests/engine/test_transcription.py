"""How each served speech model is asked for a transcript, in a language, and with words to expect."""

from __future__ import annotations

import numpy as np
import pytest

from engine import Engine, wordings
from engine.architectures import ARCHITECTURES
from engine.errors import InvalidRequest
from engine.request import AudioPart, ChatPrompt, Message, SamplingParams, TextPart, TextPrompt
from engine.transcription import TranscriptPrompts
from engine.wordings import Wording

CLIP = AudioPart((np.zeros(16_000, np.float32), 16_000))
VOXTRAL_TOKENS = {"<s>", "[INST]", "[/INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[TRANSCRIBE]"}
GRANITE_4_TOKENS = {str(index) for index in range(100_352)}
QWEN_TOKENS = {"<|AUDIO|>", "<|en|>", "<|yue|>"}
ASK, EXPECT = (
    "can you transcribe the speech into a written format?",
    "transcribe the speech to text. Keywords: Kea, Lae {x}",
)

WHOLE_OR_CHAT = [
    (wordings.GRANITE_SPEECH, {"a"}, {}, ["user", ASK]),
    (wordings.GRANITE_SPEECH, GRANITE_4_TOKENS, {}, ["user", ASK]),
    (wordings.GRANITE_SPEECH, GRANITE_4_TOKENS, {"language": "fr"}, ["user", ASK.replace("the", "the French", 1)]),
    (wordings.GRANITE_SPEECH, GRANITE_4_TOKENS, {"prompt": "Kea, Lae {x}"}, ["user", EXPECT]),
    (wordings.QWEN2_AUDIO, QWEN_TOKENS, {}, ["user", "Transcribe the speech word for word."]),
    (
        wordings.QWEN2_AUDIO,
        QWEN_TOKENS,
        {"language": "Cantonese"},
        "<A>Detect the language and recognize the speech: <|yue|>",
    ),
    (wordings.VOXTRAL, VOXTRAL_TOKENS, {}, "<s>[INST]<A>[/INST][TRANSCRIBE]"),
    (wordings.VOXTRAL, VOXTRAL_TOKENS, {"language": "pt-BR"}, "<s>[INST]<A>[/INST]lang:pt[TRANSCRIBE]"),
    (wordings.VOXTRAL, VOXTRAL_TOKENS - {"[TRANSCRIBE]"}, {}, ["user", "Transcribe the speech word for word."]),
    (
        wordings.QWEN2_5_OMNI,
        (),
        {"language": "ru"},
        ["system", "You are a speech recognition model.", "user", "Transcribe the Russian audio into text."],
    ),
]
REFUSED = [
    (wordings.GRANITE_SPEECH, {"a"}, {"language": "en"}, "does not use language", "language"),
    (wordings.GRANITE_SPEECH, {"a"}, {"prompt": "Kea"}, "does not use prompt", "prompt"),
    (wordings.GRANITE_SPEECH, GRANITE_4_TOKENS, {"prompt": "Kea", "language": "en"}, "not both", "language"),
    (wordings.QWEN2_AUDIO, QWEN_TOKENS, {"language": "sw"}, r"no token <\|sw\|>", "language"),
    (wordings.QWEN2_AUDIO, QWEN_TOKENS, {"prompt": "Kea"}, "does not use prompt", "prompt"),
    (wordings.VOXTRAL, VOXTRAL_TOKENS, {"prompt": "Kea"}, "does not use prompt", "prompt"),
    (wordings.VOXTRAL, VOXTRAL_TOKENS, {"language": "xx"}, "must be one of", "language"),
    (wordings.VOXTRAL, VOXTRAL_TOKENS - {"[TRANSCRIBE]"}, {"language": "en"}, "does not use language", "language"),
    (wordings.QWEN2_5_OMNI, (), {"prompt": "Kea"}, "does not use prompt", "prompt"),
    ((), (), {}, "takes no audio", "model"),
]


def told(prompt: ChatPrompt | TextPrompt) -> str | list[str]:
    """A whole prompt, or roles and texts of a chat."""
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return [text for message in prompt.messages for text in (message.role, text_of(message))]


def text_of(message: Message) -> str:
    """What stands in a message beside its clip."""
    if isinstance(message.content, str):
        return message.content
    [text] = [part.text for part in message.content if isinstance(part, TextPart)]
    return text


@pytest.mark.parametrize(("table", "vocabulary", "fields", "expected"), WHOLE_OR_CHAT)
def test_a_model_is_asked_in_its_makers_words(table, vocabulary, fields, expected) -> None:
    prompt = TranscriptPrompts(table, "m", vocabulary, audio="<A>", bos="<s>").build(CLIP, **fields)
    assert prompt.is_transcript and told(prompt) == expected
    clips = prompt.audio if isinstance(prompt, TextPrompt) else [prompt.messages[-1].content[0]]
    assert list(clips) == [CLIP]


@pytest.mark.parametrize(("table", "vocabulary", "fields", "reason", "param"), REFUSED)
def test_what_its_makers_have_no_words_for_is_refused(table, vocabulary, fields, reason, param) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        TranscriptPrompts(table, "m", vocabulary, audio="<A>").build(CLIP, **fields)
    assert caught.value.param == param


def test_every_model_that_hears_has_a_wording_for_any_checkpoint_of_it() -> None:
    for architecture in ARCHITECTURES.values():
        assert bool(architecture.transcription) == ("audio" in architecture.modalities)
        if architecture.transcription:
            last = architecture.transcription[-1]
            assert last.fits(()) and "{audio}" not in last.request


def test_a_whole_prompt_gives_exactly_its_tokens(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    placeholder = "<|audio|>"
    wording = Wording("{bos}{audio}<|start_of_role|>lang:{code}", language="{bos}{audio}<|start_of_role|>lang:{code}")
    prompts = TranscriptPrompts([wording], "m", (), audio=placeholder, bos="<|end_of_text|>")
    monkeypatch.setattr(tiny_engine, "transcripts", prompts)
    samples = np.sin(np.arange(8000) / 9).astype(np.float32)
    prompt = tiny_engine.transcription_prompt(AudioPart((samples, 16_000)), language="en")
    token_ids = tiny_engine.tokenize(prompt)
    [audio_id] = tiny_engine.tokenizer.encode(placeholder, add_special_tokens=False)
    num_audio = token_ids.count(audio_id)
    text = f"<|end_of_text|>{placeholder * num_audio}<|start_of_role|>lang:en"
    assert num_audio == 6 and token_ids == tiny_engine.tokenizer.encode(text, add_special_tokens=False)
    [answer] = tiny_engine.start_sync(prompt, SamplingParams(temperature=0, max_tokens=None))
    assert sum(len(delta.token_ids) for delta in answer) <= num_audio + 32
    assert answer.receipt.reason == "default:audio"
