"""What clients may send: request bodies as strict models in which every field is known, used, or refused by name.

Owns the field tables, their conversion to `SamplingParams`, and the wording of validation faults. What a message's
content holds is `api/messages`'s. Called by the routes.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from api.tools import CALLS_SCHEMA, ToolChoice, Tools, read_tools
from engine.errors import AppError, InvalidRequest
from engine.request import SamplingParams
from engine.tools.spec import ToolUse

Model = TypeVar("Model", bound="Body")

MAX_CHOICES = 128
_OLD_TOOLS = "functions are given in tools, and chosen by tool_choice"
_NO_GUIDED = "use response_format"


class Body(BaseModel):
    """A JSON request body: strict types, no unknown fields; null means absent.

    `accepted` are fields of the OpenAI API that change nothing here. `unserved` are known fields that are refused, each
    with the values that mean the same as its absence, and why.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    accepted: ClassVar[frozenset[str]] = frozenset()
    unserved: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = {}


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    unserved: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = {
        "include_obfuscation": ((False,), "streams are not padded"),
        "continuous_usage_stats": ((False,), "usage comes once, at the end"),
    }
    include_usage: bool | None = None


class JsonSchema(Body):
    """A schema that the answer must follow."""

    accepted: ClassVar[frozenset[str]] = frozenset({"description", "strict"})
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Body):
    """What the answer is made of."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def json_text(self) -> str | None:
        """The schema of the answer as JSON text, None where any text will do; raises `InvalidRequest`."""
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema_ is None:
                raise InvalidRequest(
                    "response_format has no json_schema.schema; send the schema, or the type json_object.",
                    param="response_format.json_schema.schema",
                )
            return json.dumps(self.json_schema.schema_)
        if self.json_schema is not None:
            raise InvalidRequest(
                f"response_format has a json_schema but the type {self.type!r}; send the type json_schema.",
                param="response_format.type",
            )
        return '{"type": "object"}' if self.type == "json_object" else None


# The engine's name of a field -> the client's, wherever requests are sampled.
SAMPLED_WORDS = {"json_schema": "response_format.json_schema.schema"}


class _Sampled(Body):
    """Fields that chat completions and completions share."""

    accepted: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
        }
    )
    unserved: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = {
        "min_tokens": ((0,), "a least length is not served"),
        "best_of": ((1,), "best_of is not served; use n"),
        "use_beam_search": ((False,), "beam search is not served"),
        "length_penalty": ((1, 1.0), "beam search is not served"),
        "early_stopping": ((False,), "beam search is not served"),
        "truncate_prompt_tokens": ((), "prompts are never cut"),
        "prompt_logprobs": ((), "use echo with logprobs, which scores the prompt's tokens too"),
        "allowed_token_ids": ((), "not served; use logit_bias"),
        "bad_words": (([],), "not served; use logit_bias"),
        "spaces_between_special_tokens": ((True,), "not served"),
        "return_tokens_as_token_ids": ((False,), "not served"),
        "return_token_ids": ((False,), "not served; POST /tokenize gives ids"),
        "add_special_tokens": ((), "not served"),
        "structured_outputs": ((), _NO_GUIDED),
        "guided_json": ((), _NO_GUIDED),
        "guided_regex": ((), _NO_GUIDED),
        "guided_choice": ((), _NO_GUIDED),
        "guided_grammar": ((), _NO_GUIDED),
        "logits_processors": ((), "not served"),
        "mm_processor_kwargs": ((), "not served"),
        "priority": ((0,), "all requests are equal"),
        "cache_salt": ((), "not served"),
        "kv_transfer_params": ((), "not served"),
        "vllm_xargs": ((), "not served"),
    }

    model: str
    lora: str | None = Field(None, description='"auto" (by the media in the prompt), "none", or an adapter\'s name')
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None

    @property
    def num_choices(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    def check_stream(self) -> None:
        """Refuse stream options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options needs stream: true; set it or leave the options out.", param="stream_options"
            )

    def _sampling(self, **changed: Any) -> SamplingParams:
        names = _SAMPLING_FIELDS & type(self).model_fields.keys()
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.logit_bias is not None:
            values["logit_bias"] = _logit_bias(self.logit_bias)
        if self.response_format is not None:
            values["json_schema"] = self.response_format.json_text()
        return SamplingParams(**{**values, **changed})


_SAMPLING_FIELDS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
    }
)

_PART_SCHEMA = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "input_audio", "audio_url", "image_url"]},
        "text": {"type": "string"},
        "input_audio": {
            "type": "object",
            "required": ["data"],
            "properties": {"data": {"type": "string"}, "format": {"type": "string"}},
        },
        "audio_url": {"type": "object", "required": ["url"], "properties": {"url": {"type": "string"}}},
        "image_url": {"type": "object", "required": ["url"], "properties": {"url": {"type": "string"}}},
    },
}
_MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}, {"type": "null"}]},
            "tool_calls": CALLS_SCHEMA,
            "tool_call_id": {"type": "string"},
        },
    },
}
# Read by `api/messages`, which names the part at fault; here they are only described.
Messages = Annotated[Any, WithJsonSchema(_MESSAGES_SCHEMA)]


class ChatRequest(_Sampled):
    """Body of `POST /v1/chat/completions`."""

    unserved: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = {
        **_Sampled.unserved,
        "functions": (([],), _OLD_TOOLS),
        "function_call": (("none",), _OLD_TOOLS),
        "modalities": ((["text"],), "answers are text"),
        "audio": ((), "answers are text"),
        "prediction": ((), "predicted output is not served"),
        "reasoning_effort": (("none",), "the model does not reason apart"),
        "include_reasoning": ((False,), "the model does not reason apart"),
        "verbosity": (("medium",), "not served"),
        "moderation": ((), "not served"),
        "web_search_options": ((), "the model has no web access"),
        "documents": (([],), "not served; put them into a message"),
        "chat_template": ((), "the model's own template is used"),
        "echo": ((False,), "not served for chat"),
        "prompt_logprobs": (
            (),
            "conversations are not scored; POST /tokenize gives the token ids of the messages, and /v1/completions with "
            "echo and logprobs scores token ids",
        ),
    }
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    def tool_use(self) -> ToolUse | None:
        """The functions that the model may or must call; raises `InvalidRequest`."""
        return read_tools(self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls is not False)

    def sampling(self) -> SamplingParams:
        """How to sample; raises `InvalidRequest` with the name of the field as the client wrote it."""
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs needs logprobs: true; set it or leave top_logprobs out.", param="top_logprobs"
            )
        most, limit = self.max_tokens, self.max_completion_tokens
        if most is not None and limit is not None and most != limit:
            raise InvalidRequest(
                f"max_tokens is {most} and max_completion_tokens is {limit}; they mean the same, send one.",
                param="max_tokens",
            )
        with client_words(self.words):
            return self._sampling(
                max_tokens=most if limit is None else limit,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            )

    @property
    def words(self) -> dict[str, str]:
        """What the client called fields that the engine knows by another name."""
        limit = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return {"logprobs": "top_logprobs", **SAMPLED_WORDS, **limit}

    @property
    def opens_answer(self) -> bool:
        """Whether the template opens the assistant's turn; raises `InvalidRequest` where it also continues one."""
        if not self.continue_final_message:
            return self.add_generation_prompt is not False
        if self.add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other; set one of them to false.",
                param="add_generation_prompt",
            )
        return False


class CompletionRequest(_Sampled):
    """Body of `POST /v1/completions`."""

    unserved: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = {
        **_Sampled.unserved,
        "suffix": ((), "text after the answer is not served"),
        "prompt_embeds": ((), "not served; send text or token ids"),
    }
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    def sampling(self) -> SamplingParams:
        """How to sample; raises `InvalidRequest`."""
        self.check_stream()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens is 0, but must be 1 or more; 0 needs echo: true.", param="max_tokens")
        # A prompt without an answer is scored even where nobody asks, as there is nothing else to run it for.
        wanted = 0 if self.max_tokens == 0 and self.logprobs is None else self.logprobs
        return self._sampling(
            logprobs=self.logprobs,
            prompt_logprobs=wanted if self.echo else None,
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
        )

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or many, each as text or as token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt is an empty list; send text, token ids, or a list of either.", param="prompt")
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        for place, item in enumerate(prompt):
            if isinstance(item, list) and not item:
                raise InvalidRequest(f"prompt[{place}] is an empty list of token ids.", param=f"prompt[{place}]")
        return [item for item in prompt if not isinstance(item, int)]


class LoadAdapterRequest(Body):
    """Body of `POST /v1/load_lora_adapter`."""

    unserved: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = {
        "is_3d_lora_weight": ((False,), "the layout is read from the tensors themselves"),
    }
    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    base_model_name: str | None = None


class UnloadAdapterRequest(Body):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str | None = None
    lora_int_id: int | None = None


class PatchAdapterRequest(Body):
    """Body of `PATCH /v1/adapters/{name}`."""

    pinned: bool | None = None
    generation: str | None = Field(None, description="digest of a version to go back to")
    default_for: list[str] | None = Field(
        None, description="all modalities whose prompts the adapter answers by itself; [] for none"
    )


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    tools: Tools = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


def read_body(model: type[Model], raw: bytes) -> Model:
    """Validate a JSON body; raises `InvalidRequest` whose `param` is the path of the field at fault."""
    try:
        text = raw.decode("utf-8-sig")  # Strictly: json.loads would let half characters through.
        data = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
    except UnicodeEncodeError:
        raise InvalidRequest("The body holds half of a surrogate pair, which is no text.") from None
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON ({error}).", code="invalid_json") from None
    if not isinstance(data, dict):
        raise InvalidRequest("The body is not a JSON object; send one with the fields of this route.")
    return validate(model, data)


# Fields that are objects with fields of their own, outer ones first.
_PARTS: Mapping[str, type[Body]] = {
    "stream_options": StreamOptions,
    "response_format": ResponseFormat,
    "response_format.json_schema": JsonSchema,
}


def validate(model: type[Model], data: Mapping[str, Any]) -> Model:
    """Validate fields; raises `InvalidRequest` whose `param` is the path of the field at fault."""
    known = _without_unused(model, data)
    for name, part in _PARTS.items():
        holder, _, last = name.rpartition(".")
        parent = known.get(holder) if holder else known
        if isinstance(parent, dict) and isinstance(parent.get(last), dict):
            parent[last] = _without_unused(part, parent[last], f"{name}.")
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise _first_fault(model, error, known) from None


def _without_unused(model: type[Body], data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Drop fields that change nothing; refuse those that would have to change something."""
    kept = {}
    for name, value in data.items():
        if name in model.accepted:
            continue
        if name not in model.unserved:
            kept[name] = value
            continue
        neutral, why = model.unserved[name]
        if value is not None and not any(value == same and isinstance(value, type(same)) for same in neutral):
            raise InvalidRequest(
                f"{prefix}{name} is not supported: {why}.", param=prefix + name, code="unsupported_parameter"
            )
    return kept


def _first_fault(model: type[Body], error: ValidationError, data: Mapping[str, Any]) -> InvalidRequest:
    # Of a field that may be one of several types, the fault that lies deepest is the one that the client meant.
    faults = error.errors(include_url=False, include_context=False)
    first = faults[0]["loc"][:1]
    about = [(_path(each["loc"], data), each) for each in faults if each["loc"][:1] == first]
    path, fault = max(about, key=lambda each: len(each[0]))
    if fault["type"] == "missing":
        path.append(fault["loc"][-1])
    param = render_path(path)
    if fault["type"] == "missing":
        return InvalidRequest(f"{param} is missing; it is required.", param=param, code="missing_required_parameter")
    if fault["type"] == "extra_forbidden":
        alike = difflib.get_close_matches(str(path[-1]), model.model_fields, n=1)
        remedy = f"did you mean {alike[0]}?" if alike else "remove it."
        return InvalidRequest(
            f"{param} is not a field of this request; {remedy}", param=param, code="unknown_parameter"
        )
    what = fault["msg"][0].lower() + fault["msg"][1:]
    return InvalidRequest(f"{param} is {_shown(fault['input'])}: {what}.", param=param)


def _path(loc: tuple[int | str, ...], data: Any) -> list[int | str]:
    """The steps of a fault's place that exist in the data, without the names of type alternatives."""
    path: list[int | str] = []
    for step in loc:
        is_here = (isinstance(data, dict) and step in data) or (
            isinstance(data, list) and isinstance(step, int) and step < len(data)
        )
        if is_here:
            path.append(step)
            data = data[step]
    return path


def render_path(path: list[int | str]) -> str:
    """`["messages", 0, "content"]` -> `messages[0].content`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextmanager
def client_words(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors call fields what the client called them; `names` maps our name to the client's."""
    try:
        yield
    except AppError as error:
        ours = error.param or ""
        if ours in names:
            error.param = names[ours]
            error.message = error.message.replace(ours, names[ours], 1)
        raise


def _logit_bias(raw: Mapping[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in raw.items():
        param = f"logit_bias.{key}"
        if not key.isascii() or not key.isdecimal() or len(key) > 9:
            raise InvalidRequest(f"logit_bias: {key[:20]!r} is not a token id; POST /tokenize gives ids.", param=param)
        if not math.isfinite(value) or not -100 <= value <= 100:
            raise InvalidRequest(f"{param} is {value}, but must be between -100 and 100.", param=param)
        bias[int(key)] = value
    return bias


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
