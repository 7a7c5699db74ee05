"""What quantising a base costs in exactness, with adapters in full precision on top.

    python -m benchmarks.quantization
    python -m benchmarks.quantization --model real

Every method that is installed here quantises the same base; the same random adapters, rank 16 on all linears of the decoder,
lie on top. Their logits are compared with those of the unquantised base with the same adapters, along what that answers. The
engine's tokens over the quantised base must be PEFT's on the same quantised model, or no figure is printed: each must be the
likeliest by PEFT's own logits, but for ties. `tiny` is the language model inside the embedded one; `real` is Gemma 3 270M
(`benchmarks/gemma` says where it comes from), which takes long and 8 GB.

The columns: bits that a weight of the decoder's linears takes in memory, the error of the logits as a share of their spread, the
mean Kullback-Leibler divergence in nats, and how often the likeliest token is the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from transformers import AutoConfig, AutoTokenizer

from benchmarks import quantized_copies as copies
from benchmarks.cpu_vs_peft import find_model, make_peft, run_engine
from benchmarks.report import finish, refuse
from engine import Engine, EngineConfig
from engine.architectures import find_architecture
from engine.config import EMBEDDED_MODEL, LoRAModule
from engine.linears import stored_bytes
from engine.quantization import choose_quantization, declared_in

ON_THE_FLY = {"int8": "torchao", "int8-dynamic": "torchao", "fp8": "torchao", "bitsandbytes": "bitsandbytes"}
COPIES: dict[str, tuple[str, Callable[[Path, Path], Path]]] = {
    "fp8 blocks": ("accelerate", copies.write_fp8_blocks),
    "compressed-tensors FP8": ("compressed_tensors", copies.write_compressed_fp8),
    "compressed-tensors W4A16": ("compressed_tensors", copies.write_compressed_int4),
    "gptq": ("gptqmodel", copies.write_gptq),
    "awq": ("gptqmodel", copies.write_awq),
}
MAX_TIE = {"int8-dynamic": 0.5}
"""Most that a token's logit may lie below the best; rounding inputs is not continuous."""


@dataclass
class Case:
    """A method, the folder that the engine gets, and the word of `--quantization`."""

    name: str
    folder: str
    asked: str | None = None


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny", help="tiny, real, or the folder of a base model")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="these alone")
    parser.add_argument("--prompts", type=int, default=4, help="prompts, each with an adapter of its own")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=16, help="tokens generated for each")
    return parser.parse_args()


def write_decoder(folder: Path) -> Path:
    """The embedded model's language model as a checkpoint of its own."""
    config: Any = AutoConfig.from_pretrained(EMBEDDED_MODEL)
    whole: Any = transformers.GraniteSpeechForConditionalGeneration.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    model = transformers.GraniteForCausalLM(config.text_config)
    model.model.load_state_dict(whole.model.language_model.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folder)
    return folder


def find_cases(folder: str, root: Path, only: list[str] | None) -> list[Case]:
    """What this machine can run."""

    def is_wanted(name: str, package: str) -> bool:
        return (only is None or name in only) and importlib.util.find_spec(package) is not None

    cases = [Case(name, folder, name) for name, package in ON_THE_FLY.items() if is_wanted(name, package)]
    for name, (package, write) in COPIES.items():
        if is_wanted(name, package):
            cases.append(Case(name, str(write(Path(folder), root / name.replace(" ", "-")))))
    return cases


def load(case: Case) -> Any:
    """The quantised model as transformers loads it."""
    config = AutoConfig.from_pretrained(case.folder)
    chosen = choose_quantization(
        declared_in(config), case.asked, architecture=find_architecture(config), device=torch.device("cpu"),
        dtype=torch.float32,
    )  # fmt: skip
    if chosen is not None and chosen.declared is not None:
        config.quantization_config = dict(chosen.declared)
    (name,) = config.architectures
    loading = {} if chosen is None else dict(chosen.loading)
    return (
        getattr(transformers, name).from_pretrained(case.folder, config=config, dtype=torch.float32, **loading).eval()
    )


@torch.inference_mode()
def logits_of(model: PeftModel, rows: list[list[int]], names: list[str], prompt_len: int) -> torch.Tensor:
    """Logits at each row's answer, [rows, tokens, V]: row r with adapter names[r]."""
    found = []
    for row, name in zip(rows, names, strict=True):
        model.set_adapter(name)
        found.append(model(input_ids=torch.tensor([row])).logits[0, prompt_len - 1 : -1].float())
    return torch.stack(found)


def engine_rows(
    case: Case, prompts: list[list[int]], adapters: dict[str, str], output_len: int, root: Path
) -> tuple[list[list[int]], int]:
    """Prompts with the engine's answers, all in one batch, and the bytes of its base."""
    config = EngineConfig(
        model=case.folder, quantization=case.asked, device="cpu", dtype="float32", max_loras=len(adapters),
        lora_modules=[LoRAModule(name, path) for name, path in adapters.items()], max_lora_rank=16, max_model_len=256,
        adapter_dir=str(root / "catalogue"),
    )  # fmt: skip
    engine = Engine(config)
    try:
        answers = run_engine(engine, prompts, list(adapters), output_len)
        return [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)], engine.base.num_bytes
    finally:
        engine.close()


def bits_a_weight(model: Any) -> float:
    """Of the decoder's layers, norms included."""
    text = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    linears = [module for module in text.layers.modules() if hasattr(module, "in_features")]
    count = sum(int(linear.in_features) * int(linear.out_features) for linear in linears)
    return 8 * stored_bytes(text.layers) / count


def errors(found: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """How far logits lie from the exact ones; both [rows, tokens, V]."""
    difference = (found - exact) - (found - exact).mean(-1, keepdim=True)
    spread = exact - exact.mean(-1, keepdim=True)
    log_p, log_q = exact.log_softmax(-1), found.log_softmax(-1)
    return {
        "error": float(difference.norm() / spread.norm()),
        "kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        "same_token": float((found.argmax(-1) == exact.argmax(-1)).float().mean()),
    }


def main() -> None:
    """Run all methods and print the table and the result line."""
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        is_tiny = options.model == "tiny"
        folder = str(write_decoder(root / "base")) if is_tiny else find_model(options.model, root / "base")
        exact_model, adapters = make_peft(folder, options.prompts, root / "adapters")
        names = list(adapters)
        generator = torch.Generator().manual_seed(0)
        vocab_size = exact_model.get_input_embeddings().num_embeddings
        prompts = torch.randint(
            16, vocab_size - 16, (options.prompts, options.prompt_len), generator=generator
        ).tolist()
        rows, full_bytes = engine_rows(Case("none", folder), prompts, adapters, options.output_len, root)
        exact = logits_of(exact_model, rows, names, options.prompt_len)
        check(rows, exact, "none", options.prompt_len)
        print(f"{'method':<26}{'bits':>6}{'of the bytes':>14}{'error':>9}{'KL':>11}{'same token':>12}")
        table = {}
        for case in find_cases(folder, root, options.methods):
            own_rows, num_bytes = engine_rows(case, prompts, adapters, options.output_len, root)
            base = load(case)
            bits = bits_a_weight(base)
            model = PeftModel.from_pretrained(base, adapters[names[0]], adapter_name=names[0])
            for other in names[1:]:
                model.load_adapter(adapters[other], other)
            model.eval()
            check(own_rows, logits_of(model, own_rows, names, options.prompt_len), case.name, options.prompt_len)
            row = errors(logits_of(model, rows, names, options.prompt_len), exact)
            table[case.name] = {"bits": round(bits, 2), "bytes": num_bytes} | row
            print(
                f"{case.name:<26}{bits:>6.1f}{num_bytes / full_bytes:>14.0%}{row['error']:>9.4f}{row['kl']:>11.2e}"
                f"{row['same_token']:>12.1%}"
            )
    finish({**vars(options), "rank": 16, "dtype": "float32"}, {"full_bytes": full_bytes, "methods": table})


def check(rows: list[list[int]], logits: torch.Tensor, name: str, prompt_len: int) -> None:
    """The engine's tokens must be the likeliest by these logits, but for ties."""
    chosen = torch.tensor([row[prompt_len:] for row in rows])
    gap = logits.amax(-1) - logits.gather(-1, chosen[..., None])[..., 0]
    if float(gap.max()) > MAX_TIE.get(name, 1e-3):
        refuse(f"{name}: the engine's tokens are not PEFT's, by {float(gap.max()):.4f}")


if __name__ == "__main__":
    main()
