"""An adapter with tokens of its own over HTTP: its tokenizer answers wherever token ids and texts meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from api.settings import ServerSettings
from engine import Engine, EngineConfig
from engine.config import LoRAModule
from tests.api.conftest import serve
from tests.engine.test_beyond_lora import LLAMA, make_adapter_with_tokens
from tests.oracles import VOCAB_SIZE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def without_head_rows(folder: Path) -> Path:
    """The adapter can read its tokens but not say them: their logits are minus infinity."""
    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "adapter_model.safetensors")
    return folder


def test_token_ids_and_texts_are_those_of_the_adapter(llama_dir: Path, tmp_path: Path) -> None:
    folder = make_adapter_with_tokens(llama_dir, LLAMA, tmp_path / "adapter")
    unsaid = without_head_rows(make_adapter_with_tokens(llama_dir, LLAMA, tmp_path / "unsaid"))
    config = EngineConfig(
        model=str(llama_dir), lora_modules=[LoRAModule("own", str(folder)), LoRAModule("unsaid", str(unsaid))],
        lora_extra_vocab_size=4, adapter_dir=str(tmp_path / "catalogue"),
    )  # fmt: skip
    engine = Engine(config)
    base, new = engine.model_names[0], VOCAB_SIZE + 2
    try:
        with serve(engine, ServerSettings()) as url, httpx.Client(base_url=url, timeout=60) as http:

            def post(path: str, **body: Any) -> httpx.Response:
                return http.post(path, json=body)

            own = post("/tokenize", model="own", prompt="quuxy", return_token_strs=True).json()
            assert (own["tokens"], own["token_strs"]) == ([new], ["quuxy"])
            assert len(post("/tokenize", model=base, prompt="quuxy").json()["tokens"]) == 5
            assert post("/detokenize", model="own", tokens=[new]).json()["prompt"] == "quuxy"
            assert engine.adapters.get("own").num_requests == 0

            ask = {"prompt": [65, new], "max_tokens": 2, "temperature": 0}
            biased = {"logit_bias": {str(new): 100}}
            echoed = post("/v1/completions", model="own", echo=True, **ask, **biased).json()["choices"][0]
            assert echoed["text"].endswith("quuxy" * 3)
            choice = post("/v1/completions", model="own", logprobs=1, **ask, **biased).json()["choices"][0]
            assert choice["logprobs"]["tokens"] == ["quuxy", "quuxy"]
            said = post(
                "/v1/completions", model="own", logprobs=1, **{**ask, "prompt": [65], "max_tokens": 1}, **biased
            )
            scored = post("/v1/completions", model="own", echo=True, logprobs=1, **{**ask, "max_tokens": 0}).json()
            found, expected = (each["choices"][0]["logprobs"] for each in (scored, said.json()))
            assert found["tokens"][1:] == expected["tokens"] == ["quuxy"]
            assert found["token_logprobs"][1] == pytest.approx(expected["token_logprobs"][0], abs=1e-4)
            score = {**ask, "model": "unsaid", "max_tokens": 0, "echo": True, "logprobs": 20}
            whole, streamed = (post("/v1/completions", **score, stream=is_streamed) for is_streamed in (False, True))
            assert whole.status_code == 200, whole.text
            lines = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
            chunks = [json.loads(line)["choices"][0]["logprobs"] for line in lines[:-1]]
            for logprobs in (whole.json()["choices"][0]["logprobs"], *filter(None, chunks)):
                assert logprobs["token_logprobs"] == [None, -9999.0]
                assert logprobs["top_logprobs"][1]["quuxy"] == -9999.0
            assert any(chunks)
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True}
            answer = post("/v1/chat/completions", model="own", **chat, **biased).json()["choices"][0]
            assert answer["logprobs"]["content"][0]["token"] == answer["message"]["content"] == "quuxy"
            for refused in ({**ask, "model": base}, {**ask, "prompt": "x", "model": base, **biased}):
                reply = post("/v1/completions", **refused)
                assert (
                    reply.status_code == 400 and f"between 0 and {VOCAB_SIZE - 1}" in reply.json()["error"]["message"]
                )
            beyond = post("/v1/completions", model="own", **{**ask, "prompt": [VOCAB_SIZE + 4]})
            assert beyond.status_code == 400
    finally:
        engine.close()
