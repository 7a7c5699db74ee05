"""Chat templates in the shapes that model families have, written for tests: how each takes tools and writes calls."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.oracles import make_model, make_tokenizer

# Qwen 2.5 and 3, Hermes: tools in the system turn, arguments as objects, results as a user's turn.
HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call these functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nAnswer a call as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Qwen 3: arguments may be text too; old thoughts are dropped.
QWEN3 = HERMES.replace(
    "{{- call.arguments | tojson }}",
    "{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}",
)

# Llama 3.1 and 3.2: tools in the user's turn, one call a turn, the role ipython for results.
LLAMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none and tools is defined %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- system + '<|eot_id|>' }}
{%- if tools is not none and tools is defined %}
    {%- if messages | length == 0 %}{{- raise_exception('No user turn for the tools.') }}{%- endif %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with {"name": function, "parameters": object}.\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('One call a turn.') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# Mistral 7B v0.3: a list of calls with ids of nine characters, turns that must alternate.
MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is defined and tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != 'return' %}
                    {{- '"' + key + '": ' }}{{- value | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
                {%- endfor %}
                {{- '}}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Ids of calls have nine characters.') }}{%- endif %}
            {%- set written = call.function | tojson %}
            {{- written[:-1] + ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Ids of calls have nine characters.') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only users, assistants and tools speak.') }}{%- endif %}
{%- endfor %}
"""

# Newer Mistral: a name and its arguments after each mark; arguments as text or object.
MISTRAL_NAMED = """
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- arguments if arguments is string else arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}{%- endif %}
{%- endfor %}
"""

# Granite 3.3: tools have a turn of their own; what an assistant called is not written at all.
GRANITE = """
{%- if tools %}
    {{- '<|start_of_role|>system<|end_of_role|>To call a tool, write <|tool_call|> and a JSON list.<|end_of_text|>\\n' }}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' + (tools | tojson(indent=4)) + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
"""

# Phi-4 mini: tools are text in the system message.
PHI = """
{%- for message in messages %}
    {%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
        {{- '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}
    {%- else %}
        {{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

# Phi-4 mini with instructions: earlier calls are written without the word that begins them, and arguments are text.
FUNCTOOLS = """
{%- if tools %}
    {{- '<|system|>Call functions as functools[{"name": name, "arguments": JSON}, ...]' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.content %}{{- message.content }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + '}' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

# Qwen 3 Coder: tags instead of JSON, which is not read here.
TAGS = HERMES.replace(
    '{"name": ..., "arguments": ...}', "<function=name><parameter=key>value</parameter></function>"
).replace(
    """{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}""",
    """{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
        {%- for key, value in call.arguments.items() %}
            {{- '<parameter=' + key + '>\\n' + value + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}""",
)

PLAIN = "{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}"

# A family's template, its special marks, and added tokens that are not special.
FAMILIES: dict[str, tuple[str, list[str], list[str]]] = {
    "hermes": (HERMES, ["<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>", "<think>"]),
    "hermes-words": (HERMES, ["<|im_start|>", "<|im_end|>"], []),
    "qwen3": (QWEN3, ["<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>", "<think>"]),
    "llama": (LLAMA, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"], []),
    "mistral": (MISTRAL, ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"], []),
    "mistral-named": (MISTRAL_NAMED, ["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"], []),
    "granite": (GRANITE, ["<|tool_call|>"], []),
    "phi": (PHI, ["<|tool|>", "<|/tool|>", "<|assistant|>"], ["<|tool_call|>", "<|/tool_call|>"]),
    "phi-functools": (FUNCTOOLS, ["<|assistant|>"], []),
    "tags": (TAGS, ["<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"]),
    "plain": (PLAIN, [], []),
}
NUM_IDS = 270


def make_tool_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Bytes, the tests' usual special tokens, and the family's, with its template; at most `NUM_IDS` ids."""
    template, special, added = FAMILIES[family]
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    tokenizer.chat_template = template
    return tokenizer


def make_tool_model(family: str, folder: Path, architecture: str = "LlamaForCausalLM") -> Path:
    """A tiny random model with the family's tokenizer and template."""
    make_model(architecture, folder, vocab_size=NUM_IDS, max_position_embeddings=2048)
    make_tool_tokenizer(family).save_pretrained(folder)
    return folder
