"""How speech models are asked for a transcript: one table, in the words of each model's makers.

A wording is the text beside the clip in a chat, or, where it holds `{audio}`, a whole prompt. `{language}` is a language's
English name, `{code}` its ISO 639 code, `{bos}` the tokenizer's first token, `{request}` the wording without words to expect,
`{prompt}` those words. What a model's makers have no wording for is empty and refused. Used by `engine/architectures`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """How one family of checkpoints is asked.

    Attributes:
        request: for a transcript.
        language: the same where the client says what is spoken.
        context: with words to expect.
        system: the system message of chats.
        tokens: a checkpoint whose tokenizer lacks one of these is of another family.
        least_vocab: and so is one with fewer tokens.
    """

    request: str
    language: str = ""
    context: str = ""
    system: str = ""
    tokens: tuple[str, ...] = ()
    least_vocab: int = 0

    def fits(self, vocabulary: Collection[str]) -> bool:
        """Whether a checkpoint whose tokenizer has these tokens is of the family."""
        return len(vocabulary) >= self.least_vocab and all(token in vocabulary for token in self.tokens)


GRANITE_SPEECH = (
    # Granite 4 (its tokenizer has 100,352 tokens; that of Granite 3 half of that): the package granite-speech of its makers.
    Wording(
        "can you transcribe the speech into a written format?",
        language="can you transcribe the {language} speech into a written format?",
        context="transcribe the speech to text. Keywords: {prompt}",
        least_vocab=100_000,
    ),
    # Granite 3.3: its card. Other languages are transcribed at the same request.
    Wording("can you transcribe the speech into a written format?"),
)
QWEN2_AUDIO = (
    # The language is a token after the request, in the form of the makers' own evaluation.
    Wording(
        "Transcribe the speech word for word.",
        language="{audio}Detect the language and recognize the speech: <|{code}|>",
    ),
)
VOXTRAL = (
    # The mode for transcripts, as the package mistral-common of its makers encodes it.
    Wording(
        "{bos}[INST]{audio}[/INST][TRANSCRIBE]",
        language="{bos}[INST]{audio}[/INST]lang:{code}[TRANSCRIBE]",
        tokens=("[INST]", "[/INST]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"),
    ),
    Wording("Transcribe the speech word for word."),
)
QWEN2_5_OMNI = (
    # The makers' examples of speech recognition.
    Wording(
        "Transcribe the audio into text.",
        language="Transcribe the {language} audio into text.",
        system="You are a speech recognition model.",
    ),
)
PHI_4_MULTIMODAL = (
    # Its card; the language is heard.
    Wording("Transcribe the audio clip into text."),
)
