"""From messages, text or token ids to the token ids that the model reads, with a span of placeholders for each
media item.

Owns the chat template's use and the rule that text typed by a user is text: a special token's name inside a message is
never read as that token. Knows nothing of routing or requests' lives. Called by `engine/intake`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from engine.errors import InvalidRequest, MediaError
from engine.frontend import Frontend, modality_of
from engine.request import (
    AudioPart,
    ChatPrompt,
    ImagePart,
    Message,
    Modality,
    Part,
    Prompt,
    TextPart,
    TextPrompt,
    TokenPrompt,
)
from engine.state import MediaInput, MediaSpan
from engine.tools.template import TemplateTools, probe_tools

ROLES = ("system", "developer", "user", "assistant", "tool")
_GUARD = re.compile("\ue000([0-9]+)\ue001")
"""Stands for one special token's name that a user typed, while the template is rendered: its number between two
private-use characters, so that a template may drop, move or repeat a message."""


@dataclass(frozen=True)
class BuiltPrompt:
    """Token ids [P] with their media spans, and the text that they came from (None for token prompts)."""

    token_ids: list[int]
    spans: tuple[MediaSpan, ...]
    text: str | None


class _Placed(str):
    """The modality of an item, at its place among the texts of a message."""


def media_parts(prompt: Prompt) -> list[AudioPart | ImagePart]:
    """All media of a prompt, in order, earlier turns included."""
    if isinstance(prompt, TextPrompt):
        return [*prompt.audio, *prompt.images]
    if isinstance(prompt, TokenPrompt):
        return []
    return [
        part
        for message in prompt.messages
        if not isinstance(message.content, str)
        for part in message.content
        if not isinstance(part, TextPart)
    ]


def _check_text(prompt: Prompt) -> None:
    """Refuse half characters (lone surrogates), which JSON can carry and no tokenizer reads."""
    if isinstance(prompt, TextPrompt):
        texts = [("prompt", prompt.text)]
    elif isinstance(prompt, TokenPrompt):
        texts = []
    else:
        texts = [
            (f"messages[{index}].content", text)
            for index, message in enumerate(prompt.messages)
            for text in (
                [message.content]
                if isinstance(message.content, str)
                else [part.text for part in message.content if isinstance(part, TextPart)]
            )
        ]
    for param, text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"The text holds half a character (U+{ord(text[error.start]):04X}) at {error.start}; send whole ones.",
                param=param,
            ) from None


class PromptBuilder:
    """Builds prompts for one model.

    Args:
        tokenizer: the model's fast tokenizer.
        chat_template: its template, or several by name, of which `default` and `tool_use` are used; None when the model
            has none.
        frontends: one for each modality that the model takes.
        vocab_size: ids that a token prompt may hold are below this.

    Attributes:
        tools: how the template takes tools, None where it does not.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | Mapping[str, str] | None,
        frontends: Sequence[Frontend],
        vocab_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        templates = chat_template if isinstance(chat_template, Mapping) else {"default": chat_template}
        self._chat_template = templates.get("default")
        self._tool_template = templates.get("tool_use") or self._chat_template
        # What the renderer sets for the template; the rest of the names are the template's own.
        self._own_names = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"documents"}
        self._frontends: dict[Modality, Frontend] = {frontend.modality: frontend for frontend in frontends}
        self._vocab_size = vocab_size
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= {frontend.placeholder for frontend in frontends}
        self._special_texts = sorted(special, key=len, reverse=True)
        self._single_ids = self._ids_of_single_characters()
        has_template = self._chat_template is not None
        self._takes_parts = has_template and self._probe_parts()
        self._places_media = {
            modality: has_template and self._probe_media(frontend) for modality, frontend in self._frontends.items()
        }
        self.tools = self._probe_tools()

    def build(self, prompt: Prompt, media: Sequence[MediaInput]) -> BuiltPrompt:
        """Token ids and spans; `media` are the prompt's, in the order of `media_parts`.

        Raises:
            InvalidRequest: the prompt is empty, or the template refuses the messages.
            MediaError: the number of placeholders and of media items differ.
        """
        _check_text(prompt)
        if isinstance(prompt, TokenPrompt):
            built = BuiltPrompt(self._check_ids(prompt.token_ids), (), None)
        elif isinstance(prompt, TextPrompt):
            text = self._with_expansions(prompt.text)
            token_ids = self._tokenizer(text, add_special_tokens=not prompt.is_transcript)["input_ids"]
            built = self._expand(token_ids, media, prompt.text)
        else:
            text, guarded = self._render(prompt)
            built = self._expand(self._encode_guarded(self._with_expansions(text), guarded), media, text)
        if not built.token_ids:
            raise InvalidRequest("The prompt is empty; send at least one token.", param="prompt")
        return built

    def _check_ids(self, token_ids: Sequence[int]) -> list[int]:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(
                    f"The prompt holds the token id {token_id}, but ids are between 0 and {self._vocab_size - 1}.",
                    param="prompt",
                )
        for modality, frontend in self._frontends.items():
            if frontend.placeholder_id in token_ids:
                raise InvalidRequest(
                    f"A token prompt cannot hold {modality} placeholders; send the {modality} in a message.",
                    param="prompt",
                )
        return list(token_ids)

    def _with_expansions(self, text: str) -> str:
        """A text with what the model reads in place of each placeholder."""
        for frontend in self._frontends.values():
            if frontend.expansion != frontend.placeholder:
                text = text.replace(frontend.placeholder, frontend.expansion)
        return text

    def _expand(self, token_ids: list[int], media: Sequence[MediaInput], text: str) -> BuiltPrompt:
        """Replace each single placeholder by as many as its item fills; items of a modality come in order."""
        waiting: dict[int, Iterator[MediaInput]] = {}
        for modality, frontend in self._frontends.items():
            items = [item for item in media if item.modality == modality]
            num_placeholders = token_ids.count(frontend.placeholder_id)
            if num_placeholders != len(items):
                raise MediaError(
                    f"The prompt has {num_placeholders} {frontend.placeholder} placeholder(s) for {len(items)} {modality} "
                    "item(s); write one for each."
                )
            waiting[frontend.placeholder_id] = iter(items)
        expanded: list[int] = []
        spans: list[MediaSpan] = []
        for token_id in token_ids:
            if token_id in waiting:
                item = next(waiting[token_id])
                spans.append(MediaSpan(len(expanded), item))
                expanded += [token_id] * item.num_tokens
            else:
                expanded.append(token_id)
        return BuiltPrompt(expanded, tuple(spans), text)

    def _render(self, prompt: ChatPrompt) -> tuple[str, list[str]]:
        """The template's text, with a guard character for each special token's name that stood in a message."""
        if self._chat_template is None:
            raise InvalidRequest(
                "The model has no chat template, so it cannot chat; use /v1/completions with a plain prompt.",
                param="messages",
            )
        if not prompt.messages:
            raise InvalidRequest("messages is empty; send at least one message.", param="messages")
        guarded: list[str] = []
        conversation = [self._message(message, index, guarded) for index, message in enumerate(prompt.messages)]
        template: str | None = self._chat_template
        tools: list[dict[str, Any]] | None = None
        if prompt.tools is not None:
            definitions = [function.definition for function in prompt.tools.functions]
            guarded_definitions = [self._guard_all(definition, guarded) for definition in definitions]
            conversation, tools = self._tool_side("tools").place_tools(conversation, guarded_definitions)
        if prompt.tools is not None or any(message.tool_calls for message in prompt.messages):
            template = self._tool_template
        if taken := sorted(self._own_names & prompt.template_kwargs.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs.{taken[0]} is not for clients to set; leave it out.",
                param=f"chat_template_kwargs.{taken[0]}",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation,
                **({} if tools is None else {"tools": tools}),
                chat_template=template,
                tokenize=False,
                add_generation_prompt=prompt.add_generation_prompt and not prompt.continue_final_message,
                continue_final_message=prompt.continue_final_message,
                **prompt.template_kwargs,
            )
        except Exception as error:  # Templates are programs that ship with models: they raise what they like.
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}.", param="messages"
            ) from error
        return text, guarded

    def _message(self, message: Message, index: int, guarded: list[str]) -> dict[str, Any]:
        if message.role not in ROLES:
            raise InvalidRequest(
                f"The role {message.role!r} is not known; known are {', '.join(ROLES)}.",
                param=f"messages[{index}].role",
            )
        role = "system" if message.role == "developer" else message.role
        pieces = self._pieces(message.content, guarded)
        fields: dict[str, Any] = {}
        if message.tool_calls:
            tools = self._tool_side(f"messages[{index}].tool_calls")
            if tools.writes_calls:
                fields["tool_calls"] = [self._guard_all(tools.call(call), guarded) for call in message.tool_calls]
            elif tools.tool_format is not None:
                calls = [replace(call, arguments=self._guard(call.arguments, guarded)) for call in message.tool_calls]
                pieces.append(tools.tool_format.write(calls))
        elif role == "tool" and self.tools is not None:
            call_id = message.tool_call_id and self.tools.template_id(message.tool_call_id)
            labels = {"tool_call_id": call_id, "name": message.name}
            fields = {key: self._guard(value, guarded) for key, value in labels.items() if value}
        return {"role": role, "content": self._as_content(pieces), **fields}

    def _tool_side(self, param: str) -> TemplateTools:
        """How the template takes tools; raises `InvalidRequest` where it does not, or where calls could not be read."""
        if self.tools is None:
            raise InvalidRequest(
                f"{param} is not served with this model: its chat template takes no tools; leave it out, or serve a model "
                "whose template takes them.",
                param=param,
                code="unsupported_parameter",
            )
        if self.tools.tool_format is None:
            raise InvalidRequest(
                f"{param} is not served with this model: its chat template takes tools, but calls in its form are not "
                "known here; describe the tools in a message and read the answer's text.",
                param=param,
                code="unsupported_parameter",
            )
        return self.tools

    def _pieces(self, content: str | Sequence[Part], guarded: list[str]) -> list[str]:
        """Texts and places of media of a message, in order, with names of special tokens guarded."""
        if isinstance(content, str):
            return [self._guard(content, guarded)]
        pieces: list[str] = []
        is_text = False
        for part in content:
            if isinstance(part, TextPart):
                text = self._guard(part.text, guarded)
                if is_text:
                    pieces[-1] += "\n" + text
                else:
                    pieces.append(text)
            else:
                pieces.append(_Placed(modality_of(part)))
            is_text = isinstance(part, TextPart)
        return pieces

    def _as_content(self, pieces: Sequence[str]) -> Any:
        """What the template gets for a message: a list of parts where it wants one or places the media, else text."""
        media: set[str] = {piece for piece in pieces if isinstance(piece, _Placed)}
        if media and all(self._places_media[cast("Modality", modality)] for modality in media):
            return [
                {"type": str(piece)} if isinstance(piece, _Placed) else {"type": "text", "text": piece}
                for piece in pieces
            ]
        text = "".join(
            self._frontends[cast("Modality", piece)].inline if isinstance(piece, _Placed) else piece for piece in pieces
        )
        return [{"type": "text", "text": text}] if self._takes_parts else text

    def _guard(self, text: str, guarded: list[str]) -> str:
        """Replace names of special tokens by guards, in order; `_encode_guarded` puts them back as plain text."""
        names = ("\ue000", *self._special_texts)
        if not any(name in text for name in names):
            return text
        result: list[str] = []
        position = 0
        while position < len(text):
            special = next((name for name in names if text.startswith(name, position)), "")
            if special:
                result.append(f"\ue000{len(guarded)}\ue001")
                guarded.append(special)
            else:
                result.append(text[position])
            position += len(special) or 1
        return "".join(result)

    def _guard_all(self, value: Any, guarded: list[str]) -> Any:
        """`_guard` for every text of a JSON value, keys included."""
        if isinstance(value, str):
            return self._guard(value, guarded)
        if isinstance(value, Mapping):
            return {self._guard(key, guarded): self._guard_all(each, guarded) for key, each in value.items()}
        return [self._guard_all(each, guarded) for each in value] if isinstance(value, (list, tuple)) else value

    def _encode_guarded(self, text: str, guarded: list[str]) -> list[int]:
        """Tokenise a rendered text; what the guards stand for is tokenised in two halves, which are no special token."""
        if not guarded:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        token_ids: list[int] = []
        for index, piece in enumerate(_GUARD.split(text)):
            if index % 2:
                # A number that stands for nothing was in the text by itself (an argument of the template).
                is_known = len(piece) < 9 and int(piece) < len(guarded)
                token_ids += self._plain_ids(guarded[int(piece)] if is_known else f"\ue000{piece}\ue001")
            elif piece:
                token_ids += self._tokenizer(piece, add_special_tokens=False)["input_ids"]
        return token_ids

    def _plain_ids(self, name: str) -> list[int]:
        """Ids of a special token's name as plain text: of its two halves, which are no special token."""
        if name in self._single_ids:
            return self._single_ids[name]
        halves = (name[: len(name) // 2], name[len(name) // 2 :])
        return [id_ for half in halves for id_ in self._tokenizer(half, add_special_tokens=False)["input_ids"]]

    def _ids_of_single_characters(self) -> dict[str, list[int]]:
        """Plain ids of special tokens that are one character, which has no halves.

        Worked out here, since `split_special_tokens` switches the one tokenizer for all threads; the last call, without
        it, switches back.
        """
        names = [name for name in self._special_texts if len(name) == 1]
        ids = {
            name: list(self._tokenizer(name, add_special_tokens=False, split_special_tokens=True)["input_ids"])
            for name in names
        }
        self._tokenizer("", add_special_tokens=False)
        return ids

    def _probe_tools(self) -> TemplateTools | None:
        """How the template takes tools."""
        template = self._tool_template
        if template is None:
            return None

        def render(messages: Any, tools: Any, opens_answer: bool) -> str:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=opens_answer
            )
            return text

        return probe_tools(render, template, self._tokenizer.get_vocab(), lambda text: self._as_content([text]))

    def _probe_parts(self) -> bool:
        """Whether the template wants a message's content as a list of parts rather than as a string."""
        probe = "probe-of-the-template"
        for content, is_list in ((probe, False), ([{"type": "text", "text": probe}], True)):
            try:
                text = self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}], chat_template=self._chat_template, tokenize=False
                )
            except Exception:  # noqa: BLE001 - as above: a template may raise anything on a form that it does not take
                continue
            if probe in text and "'type'" not in text:
                return is_list
        return False

    def _probe_media(self, frontend: Frontend) -> bool:
        """Whether the template, given a part of this modality, writes its placeholder by itself, once."""
        probe = "probe-of-the-template"
        parts = [{"type": frontend.modality}, {"type": "text", "text": probe}]
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": parts}], chat_template=self._chat_template, tokenize=False
            )
        except Exception:  # noqa: BLE001 - as above
            return False
        return probe in text and "'type'" not in text and text.count(frontend.placeholder) == 1
