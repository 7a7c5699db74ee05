"""How a program asks for what is chosen here: curl and the openai package, as escaped HTML. Called by `ui/status`.

The server's address is filled in by the page's script, which alone knows how the visitor reached it.
"""

from __future__ import annotations

import json
import shlex
from html import escape

from engine.routing import AUTO, NONE
from ui.text import Texts

ADDRESS = "ADDRESS_OF_THIS_SERVER"
_RECORDING = "recording.wav"


def curl_snippet(model: str, lora: str, *, needs_key: bool, is_speech: bool = False) -> str:
    """A command line; with `is_speech` one that sends a recording rather than words."""
    if is_speech:
        key = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
        fields = " ".join(f"-F {shlex.quote(f'{name}={value}')}" for name, value in _fields(model, lora).items())
        return f"curl {ADDRESS}v1/audio/transcriptions{key} \\\n  {fields} -F file=@{_RECORDING}"
    body = json.dumps({**_fields(model, lora), "messages": [{"role": "user", "content": "Hello!"}]}, ensure_ascii=False)
    key = '  -H "Authorization: Bearer $API_KEY" \\\n' if needs_key else ""
    quoted = body.replace("'", "'\\''")
    return f"curl {ADDRESS}v1/chat/completions \\\n{key}  -H \"Content-Type: application/json\" \\\n  -d '{quoted}'"


def python_snippet(model: str, lora: str, *, needs_key: bool, is_speech: bool = False) -> str:
    """A program with the openai package; with `is_speech` one that sends a recording rather than words."""
    fields = _fields(model, lora)
    extra = f'\n    extra_body={{"lora": {json.dumps(fields["lora"])}}},' if "lora" in fields else ""
    key = 'os.environ["API_KEY"]' if needs_key else '"unused"'
    imports = "import os\n\n" if needs_key else ""
    client = f'{imports}from openai import OpenAI\n\nclient = OpenAI(base_url="{ADDRESS}v1", api_key={key})\n'
    if is_speech:
        return (
            f'{client}with open("{_RECORDING}", "rb") as recording:\n    answer = client.audio.transcriptions.create(\n'
            f"        model={json.dumps(fields['model'])},\n        file=recording,{extra.replace('    ', '        ')}\n    )\n"
            "print(answer.text)"
        )
    return (
        f"{client}answer = client.chat.completions.create(\n    model={json.dumps(fields['model'])},\n"
        f'    messages=[{{"role": "user", "content": "Hello!"}}],{extra}\n)\n'
        "print(answer.choices[0].message.content)"
    )


def _fields(model: str, lora: str) -> dict[str, str]:
    """An adapter is asked for by its name as the model; the base model without the routing rule needs `lora`."""
    if lora == AUTO:
        return {"model": model}
    return {"model": model, "lora": NONE} if lora == NONE else {"model": lora}


def snippets_html(text: Texts, model: str, lora: str, *, needs_key: bool, is_speech: bool = False) -> str:
    """Both, each with a button that copies it."""
    written = {
        "curl": curl_snippet(model, lora, needs_key=needs_key, is_speech=is_speech),
        "python": python_snippet(model, lora, needs_key=needs_key, is_speech=is_speech),
    }
    return "".join(
        f"<section class='snippet'><h3>{escape(text(f'status.{kind}'))}</h3>"
        f"<button type='button' data-copy aria-label='{escape(text('status.copy_label', kind=text(f'status.{kind}')))}'>"
        f"{escape(text('status.copy'))}</button>"
        f"<pre tabindex='0'><code>{escape(code).replace(ADDRESS, '<span data-address></span>')}</code></pre></section>"
        for kind, code in written.items()
    )
