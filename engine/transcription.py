"""What to ask a model beside a clip to get its transcript, with what the client knows about the recording.

Chooses among the architecture's wordings by the checkpoint's tokenizer; what a model has no wording for is refused, never left
out. Called by `engine/engine`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from engine.errors import InvalidRequest
from engine.request import AudioPart, ChatPrompt, Message, TextPart, TextPrompt
from engine.wordings import Wording

LANGUAGES = {
    "ar": "Arabic", "bg": "Bulgarian", "bn": "Bengali", "ca": "Catalan", "cs": "Czech", "da": "Danish", "de": "German",
    "el": "Greek", "en": "English", "es": "Spanish", "et": "Estonian", "fa": "Persian", "fi": "Finnish", "fr": "French",
    "he": "Hebrew", "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian", "id": "Indonesian", "it": "Italian",
    "ja": "Japanese", "ko": "Korean", "lt": "Lithuanian", "lv": "Latvian", "ms": "Malay", "nl": "Dutch",
    "no": "Norwegian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sk": "Slovak",
    "sl": "Slovenian", "sr": "Serbian", "sv": "Swedish", "sw": "Swahili", "ta": "Tamil", "te": "Telugu", "th": "Thai",
    "tl": "Tagalog", "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "vi": "Vietnamese", "yue": "Cantonese",
    "zh": "Chinese",
}  # fmt: skip
"""ISO 639 codes (two letters where there are two) and the names that prompts use."""


class TranscriptPrompts:
    """Builds the prompts that ask one model for transcripts.

    Args:
        wordings: the architecture's; none where it takes no audio.
        model_name: for messages.
        vocabulary: the tokenizer's tokens.
        audio: text that stands for a clip in a whole prompt.
        bos: text of the token that a whole prompt begins with.
    """

    def __init__(
        self,
        wordings: Sequence[Wording],
        model_name: str,
        vocabulary: Collection[str],
        *,
        audio: str = "",
        bos: str = "",
    ) -> None:
        self._wording = next((wording for wording in wordings if wording.fits(vocabulary)), None)
        self._model_name = model_name
        self._vocabulary = vocabulary
        self._audio, self._bos = audio, bos

    def build(
        self, audio: AudioPart, *, language: str | None = None, prompt: str | None = None
    ) -> ChatPrompt | TextPrompt:
        """The prompt for one clip.

        Args:
            audio: the clip.
            language: what is spoken: an ISO 639 code, perhaps with a region, or an English name.
            prompt: words to expect.

        Raises:
            InvalidRequest: the model takes no audio, language or prompt, not both, or not this language.
        """
        wording = self._wording
        if wording is None:
            raise InvalidRequest(f"The model {self._model_name!r} takes no audio.", param="model")
        if prompt:
            self._check_use(wording.context, "prompt")
            if language and "{request}" not in wording.context:
                raise InvalidRequest(
                    f"The model {self._model_name!r} takes language or prompt, not both; leave one out.",
                    param="language",
                )
        text = wording.request
        values = {"audio": self._audio, "bos": self._bos}
        if language:
            self._check_use(wording.language, "language")
            code = language_code(language)
            text = wording.language
            values |= {"code": code, "language": LANGUAGES[code]}
        if prompt:
            text, values = wording.context, {**values, "request": text.format(**values), "prompt": prompt}
        is_whole = "{audio}" in text
        text = text.format(**values)
        if is_whole:
            self._check_tags(text, language)
            return TextPrompt(text, [audio], is_transcript=True)
        system = [Message("system", wording.system)] if wording.system else []
        return ChatPrompt([*system, Message("user", [audio, TextPart(text)])], is_transcript=True)

    def _check_use(self, wording: str, param: str) -> None:
        if not wording:
            raise InvalidRequest(f"The model {self._model_name!r} does not use {param}; leave it out.", param=param)

    def _check_tags(self, text: str, language: str | None) -> None:
        """A language's tag must be one of the tokenizer's tokens."""
        for tag in re.findall(r"<\|\w+\|>$", text):
            if tag not in self._vocabulary:
                raise InvalidRequest(
                    f"language is {str(language)[:60]!r}, but the model {self._model_name!r} has no token {tag} for it; leave "
                    "language out.",
                    param="language",
                )


def language_code(language: str) -> str:
    """ISO 639 code of a language in the list; raises `InvalidRequest` for one that is not."""
    wanted = language.strip().lower()
    by_name = {name.lower(): code for code, name in LANGUAGES.items()}
    code = by_name.get(wanted) or wanted.replace("_", "-").split("-")[0]
    if code not in LANGUAGES:
        raise InvalidRequest(
            f"language is {language[:60]!r}, but must be one of {', '.join(LANGUAGES)}.", param="language"
        )
    return code
