"""What to ask a model beside a clip to get its transcript, with what the client knows about the recording.

A pure function of the architecture's wordings; what a model has no wording for is refused, never left out. Called by
`engine/engine`.
"""

from __future__ import annotations

from engine.architectures import Architecture
from engine.errors import InvalidRequest

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


def transcription_request(
    architecture: Architecture, model_name: str, *, language: str | None, prompt: str | None
) -> str:
    """The text that stands beside a clip.

    Args:
        architecture: whose wordings count.
        model_name: for messages.
        language: what is spoken: an ISO 639 code, perhaps with a region, or an English name.
        prompt: words to expect.

    Raises:
        InvalidRequest: the model takes no audio, language or prompt, or the language is not known.
    """
    if not architecture.transcription_request:
        raise InvalidRequest(f"The model {model_name!r} takes no audio.", param="model")
    request = architecture.transcription_request
    if language:
        _check_use(architecture.language_request, model_name, "language")
        request = architecture.language_request.format(language=language_name(language))
    if prompt:
        _check_use(architecture.context_request, model_name, "prompt")
        request = architecture.context_request.format(request=request, prompt=prompt)
    return request


def language_name(language: str) -> str:
    """English name of a language; raises `InvalidRequest` for one that is not in the list."""
    wanted = language.strip().lower()
    by_name = {name.lower(): name for name in LANGUAGES.values()}
    name = by_name.get(wanted) or LANGUAGES.get(wanted.replace("_", "-").split("-")[0])
    if name is None:
        raise InvalidRequest(
            f"language is {language[:60]!r}, but must be one of {', '.join(LANGUAGES)}.", param="language"
        )
    return name


def _check_use(wording: str, model_name: str, param: str) -> None:
    if not wording:
        raise InvalidRequest(f"The model {model_name!r} does not use {param}; leave it out.", param=param)
