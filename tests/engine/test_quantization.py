"""Quantised bases with LoRA in full precision on top: the tokens are PEFT's on the same quantised model."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import BitsAndBytesConfig, CompressedTensorsConfig, TorchAoConfig

from adapters.__main__ import main as adapters_main
from adapters.errors import AppError
from adapters.surface import LinearSite
from benchmarks import quantized_copies as quantized
from engine import Engine, EngineConfig, SamplingParams
from engine.__main__ import main as engine_main
from engine.answer import Answer
from engine.architectures import ARCHITECTURES
from engine.compiler import StepKind, compile_decoder
from engine.config import LoRAModule
from engine.errors import InvalidRequest
from engine.linears import is_linear, is_plain, stored_bytes
from engine.lora_layers import LoraBuffers
from engine.model import BaseModel, load_model, outline_model
from engine.quantization import choose_quantization
from engine.request import TokenPrompt
from kernels import LoraMetadata
from tests.oracles import VOCAB_SIZE, make_adapter, make_model, random_ids

pytestmark = pytest.mark.filterwarnings("ignore")  # The packages' own business.

LLAMA, QWEN = "LlamaForCausalLM", "Qwen2ForCausalLM"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
NAMES = [None, "all", None, "all"]
PROMPTS = [random_ids(7 + 9 * row, row) for row in range(len(NAMES))]
NUM_TOKENS = 8


class World:
    """Tiny models, an adapter on all their linears, and quantised copies, made when they are asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[str, Path] = {}

    def make(self, name: str, write: Callable[[Path], Path]) -> Path:
        if name not in self._made:
            self._made[name] = write(self.root / name)
        return self._made[name]

    def base(self, architecture: str = LLAMA) -> Path:
        more = {"vocab_size": VOCAB_SIZE + 1} if architecture == QWEN else {}  # Room for the GGUF file's merge.
        return self.make(architecture, lambda folder: make_model(architecture, folder, **SIZES, **more))

    def adapter(self, architecture: str = LLAMA) -> Path:
        base = self.base(architecture)
        return self.make(
            f"adapter-{architecture}",
            lambda folder: make_adapter(base, architecture, folder, targets="all-linear", rank=8, alpha=6, std=0.2),
        )

    def saved(self, name: str, settings: Any) -> Path:
        """A checkpoint that transformers quantised and saved."""

        def write(folder: Path) -> Path:
            model = transformers.LlamaForCausalLM.from_pretrained(self.base(), quantization_config=settings())
            model.save_pretrained(folder)
            transformers.AutoTokenizer.from_pretrained(self.base()).save_pretrained(folder)
            return folder

        return self.make(name, write)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("quantized"))


def torchao(name: str) -> TorchAoConfig:
    from torchao import quantization

    return TorchAoConfig(getattr(quantization, name)())


# Method -> settings of the engine, and how transformers loads the same.
def int8(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"quantization": "int8"}, {"quantization_config": torchao("Int8WeightOnlyConfig")}


def int8_checkpoint(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"model": world.saved("int8", lambda: torchao("Int8WeightOnlyConfig")), "quantization": "torchao"}, {}


def fp8(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"quantization": "fp8"}, {"quantization_config": torchao("Float8WeightOnlyConfig")}


def nf4(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"quantization": "bitsandbytes"}, {"quantization_config": NF4}


def bitsandbytes_8bit(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"model": world.saved("bnb8", lambda: BitsAndBytesConfig(load_in_8bit=True))}, {}


def compressed_int4(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = world.make("w4a16", functools.partial(quantized.write_compressed_int4, world.base()))
    return {"model": folder}, {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def compressed_fp8(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = world.make("ct-fp8", functools.partial(quantized.write_compressed_fp8, world.base()))
    return {"model": folder}, {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def fp8_blocks(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"model": world.make("fp8", functools.partial(quantized.write_fp8_blocks, world.base()))}, {}


def gguf_folder(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    def write(folder: Path) -> Path:
        folder.mkdir()
        quantized.write_gguf(world.base(QWEN), folder / "tiny.gguf")
        return folder

    return {"model": world.make("gguf", write)}, {"gguf_file": "tiny.gguf"}


METHODS = [
    int8, int8_checkpoint, fp8, nf4, bitsandbytes_8bit, compressed_int4, compressed_fp8, fp8_blocks, gguf_folder,
]  # fmt: skip
UNPACKED = (compressed_int4, compressed_fp8, fp8_blocks, gguf_folder)


def make_engine(world: World, architecture: str = LLAMA, **settings: Any) -> Engine:
    config = {"model": world.base(architecture), "adapter_dir": world.root / "catalogue"} | settings
    texts = {name: str(value) if isinstance(value, Path) else value for name, value in config.items()}
    modules = [LoRAModule("all", str(world.adapter(architecture)))]
    return Engine(
        EngineConfig(lora_modules=modules, max_loras=2, max_lora_rank=8, max_num_batched_tokens=50, **texts),
        checks_integrity=True,
    )


def tokens(answer: Answer) -> list[int]:
    return [token_id for delta in answer for token_id in delta.token_ids]


def answers(engine: Engine, prompts: Sequence[list[int]], names: Sequence[str | None]) -> list[list[int]]:
    """All in one batch."""
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    started = [
        engine.start_sync(TokenPrompt(ids), greedy, lora=name)[0] for ids, name in zip(prompts, names, strict=True)
    ]
    return [tokens(answer) for answer in started]


def peft_answers(load: Callable[[], Any], adapter: Path) -> list[list[int]]:
    """transformers and PEFT, one by one."""
    models = {None: load().eval(), "all": PeftModel.from_pretrained(load(), adapter).eval()}
    found = []
    for ids, name in zip(PROMPTS, NAMES, strict=True):
        inputs = torch.tensor([ids])
        with torch.inference_mode():
            output = models[name].generate(
                input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NUM_TOKENS, do_sample=False,
                eos_token_id=None,
            )  # fmt: skip
        found.append(output[0, len(ids) :].tolist())
    return found


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_a_mixed_batch_equals_peft_on_the_same_quantised_model(
    world: World, method: Callable[[World], tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    settings, loading = method(world)
    architecture = QWEN if method is gguf_folder else LLAMA
    folder = settings.get("model", world.base())
    load = functools.partial(
        getattr(transformers, architecture).from_pretrained, folder, dtype=torch.float32, **loading
    )
    expected = peft_answers(load, world.adapter(architecture))
    assert len(set(map(tuple, expected))) == len(expected), "the oracle is degenerate"
    engine = make_engine(world, architecture, **settings)
    try:
        assert answers(engine, PROMPTS, NAMES) == expected
        plain = world.base(architecture)
        full_bytes = outline_model(str(plain)).num_bytes
        linears = [module for name, module in engine.base.model.named_modules() if name.endswith("_proj")]
        assert all(is_linear(module) and hasattr(module, "switchboard_lora") for module in linears)
        if method in UNPACKED:
            assert full_bytes <= engine.base.num_bytes < 1.05 * full_bytes
        else:
            assert engine.base.num_bytes < 0.5 * full_bytes
    finally:
        engine.close()


def test_rounded_inputs_depend_on_their_own_token_alone(world: World) -> None:
    """Rounding is not continuous, so tokens may leave PEFT's; but a token's neighbours have no part in it."""
    engine = make_engine(world, quantization="int8-dynamic")
    try:
        greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
        answer = engine.start_sync(TokenPrompt(PROMPTS[1]), greedy, lora="all")[0]
        (found,) = [entry for delta in answer for entry in delta.logprobs]
    finally:
        engine.close()
    linear = load(world.base(), quantization="int8-dynamic").decoder.layers[0].mlp.down_proj
    rows = torch.randn(9, SIZES["intermediate_size"]) * torch.arange(1, 10)[:, None]
    with torch.inference_mode():
        assert torch.equal(linear(rows), torch.cat([linear(row[None]) for row in rows]))
    loading = {"quantization_config": torchao("Int8DynamicActivationInt8WeightConfig")}
    model = PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(world.base(), **loading), world.adapter()
    )
    with torch.inference_mode():
        expected = model.eval()(input_ids=torch.tensor([PROMPTS[1]])).logits[0, -1].log_softmax(-1)
    assert found.token_id == int(expected.argmax())
    assert found.logprob == pytest.approx(float(expected.max()), abs=0.1)


def test_quantised_layers_are_one_graph(world: World, tmp_path: Path) -> None:
    small = make_model(LLAMA, tmp_path / "model", **SIZES | {"num_hidden_layers": 1})
    adapter = make_adapter(small, LLAMA, tmp_path / "adapter", targets="all-linear", rank=8, std=0.2)
    world = World(tmp_path)
    world._made = {LLAMA: small, f"adapter-{LLAMA}": adapter}
    engine = make_engine(world, quantization="int8")
    try:
        expected = answers(engine, PROMPTS, NAMES)
        compile_decoder(engine.base.decoder, [StepKind(engine._loop._runner.warm_up, 50)], backend="eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert answers(engine, PROMPTS, NAMES) == expected
    finally:
        engine.close()
        torch._dynamo.reset()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_towers_connectors_and_the_head_stay_as_they_are(speech_dir: Path, load_format: str) -> None:
    base = load(speech_dir, load_format=load_format, quantization="int8")
    quantised = {name for name, module in base.model.named_modules() if is_linear(module) and not is_plain(module)}
    sites = base.surface(max_lora_rank=4, lora_dtype=base.dtype).linears.values()
    assert quantised == {site.name for site in sites if site.part == "decoder"} != set()


def load(folder: Path, **settings: Any) -> BaseModel:
    defaults = {
        "load_format": "auto",
        "dtype": "auto",
        "device": "cpu",
        "gguf_file": None,
        "seed": 0,
        "quantization": None,
    }
    return load_model(str(folder), **defaults | settings)


def test_memory_is_that_of_the_tensors_inside(world: World) -> None:
    base = load(world.base(), quantization="int8")
    file = world.saved("int8", lambda: torchao("Int8WeightOnlyConfig")) / "model.safetensors"
    assert base.num_bytes == sum(tensor.nbytes for tensor in load_file(file).values())
    nf4 = load(world.base(), quantization="bitsandbytes")
    packed = stored_bytes(nf4.decoder.layers) / sum(p.numel() for p in base.decoder.layers.parameters())
    assert 0.5 + 4 / 64 <= packed < 0.75  # Half a byte, a scale for 64 weights; norms and tables come on top.


# One rule for all classes


class Doubling(nn.Linear):
    """Computes in its own way, has no subclasses, and its weight says nothing of its shape."""

    def __init_subclass__(cls) -> None:
        raise TypeError("final")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * nn.functional.linear(input, self.weight.view(self.out_features, self.in_features))


class Buffered(nn.Module):
    """No `nn.Linear`, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 4, 6
        self.register_buffer("packed", torch.randn(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed.t() + 1  # type: ignore[operator]


def doubling() -> nn.Module:
    module = Doubling(4, 6, bias=False)
    module.weight = nn.Parameter(module.weight.detach().view(24, 1))
    return module


def patched() -> nn.Module:
    """An `nn.Linear` whose forward is an attribute of its own, as some libraries leave it."""
    module = nn.Linear(4, 6)
    own = module.forward
    module.forward = lambda x: own(x) * 3  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("make", [doubling, Buffered, patched])
def test_whatever_has_in_and_out_features_gets_lora_on_its_own_product(make: Callable[[], nn.Module]) -> None:
    model = nn.ModuleDict({"q_proj": make(), "k_proj": make(), "v_proj": make()})
    x = torch.randn(5, 4)
    with torch.inference_mode():
        plain = {name: module(x) for name, module in model.items()}
        sites = {name: LinearSite(name, 4, 6, "decoder") for name in model}
        metadata = LoraMetadata(8, 2, torch.device("cpu"), max_columns=6, max_in=4)
        buffers = LoraBuffers(model, sites, {"decoder": metadata}, num_slots=2, max_rank=2, dtype=torch.float32)
        assert len(buffers.groups) == 3, "layers that are not plain are not computed together"
        for group in buffers.groups:
            group.lora_a.normal_()
            group.lora_b.normal_()
            group.host_ranks[1] = [2]
            group.ranks[1] = 2
        metadata.update([], 5)
        assert all(torch.equal(model[name](x), plain[name]) for name in model)
        metadata.update([(1, 2, 5)], 5)
        for group in buffers.groups:
            (name,) = group.names
            added = torch.zeros(5, 6)
            added[2:] = x[2:] @ group.lora_a[1, 0].t() @ group.lora_b[1].t()
            torch.testing.assert_close(model[name](x), plain[name] + added)


# What is refused


@pytest.mark.parametrize(
    ("method", "match"),
    [
        (
            "int3",
            "--quantization int3: it must be one of int8, int8-dynamic, int4, fp8, fp8-dynamic, bitsandbytes, or the",
        ),
        ("awq", "--quantization awq: the checkpoint is not quantised with it; what can be done while loading is int8,"),
        (
            "int4",
            "--quantization int4: 4-bit products of torchao need a CUDA GPU and --dtype bfloat16; use bitsandbytes",
        ),
        ("fp8-dynamic", "--quantization fp8-dynamic: float8 products need an Ada or Hopper GPU"),
    ],
)
def test_what_cannot_be_done_while_loading_is_refused(world: World, method: str, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        load(world.base(), quantization=method)


def test_contradictions_are_refused(world: World) -> None:
    folder = world.make("fp8", functools.partial(quantized.write_fp8_blocks, world.base()))
    with pytest.raises(InvalidRequest, match="int8: the checkpoint is quantised already, with fp8; leave the flag out"):
        load(folder, quantization="int8")
    with pytest.raises(InvalidRequest, match="bitsandbytes: random weights are not quantised with it; use int8"):
        load(world.base(), load_format="dummy", quantization="bitsandbytes")
    gguf_dir = gguf_folder(world)[0]["model"]
    with pytest.raises(InvalidRequest, match="int8: the checkpoint is quantised already, with gguf"):
        load(gguf_dir, gguf_file="tiny.gguf", quantization="int8")


@pytest.mark.parametrize(
    ("declared", "packages"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "gptqmodel optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "gptqmodel"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "quanto", "weights": "int8"}, "optimum-quanto"),
        (None, "torchao"),
    ],
)
def test_a_missing_package_is_named_with_the_command(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: dict[str, Any] | None, packages: str
) -> None:
    find = importlib.util.find_spec
    missing = ("torchao", "bitsandbytes", "gptqmodel", "optimum", "compressed_tensors")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name.split(".")[0] in missing else find(name, *rest)
    )
    config = json.loads((world.base() / "config.json").read_text()) | {"quantization_config": declared}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match=re.escape(f"install with: pip install {packages}") + "$"):
        load(tmp_path, quantization="int8" if declared is None else None)


def test_what_a_package_raises_while_loading_is_one_sentence(world: World, tmp_path: Path) -> None:
    config = json.loads((world.base() / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "spqr", "bits": 3}})
    )
    with pytest.raises(AppError, match=r"loaded (with the quantization spqr|from) .*\("):
        load(tmp_path)


def test_blocks_of_float8_are_unpacked_on_a_gpu_without_the_package_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """This project has a folder of that name, which is not the package."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    declared = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    chosen = choose_quantization(
        declared, None, architecture=ARCHITECTURES[LLAMA], device=torch.device("cuda"), dtype=torch.bfloat16
    )
    assert chosen is not None and chosen.is_unpacked and chosen.can_be_recorded


@pytest.mark.parametrize(("asked", "expected"), [("int8", True), ("int8-dynamic", False)])
def test_layers_that_neither_compile_nor_record_run_launch_by_launch(
    asked: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    settings: Any = {"architecture": ARCHITECTURES[LLAMA], "device": torch.device("cuda"), "dtype": torch.bfloat16}
    chosen = choose_quantization(None, asked, **settings)
    assert chosen is not None and chosen.can_be_recorded is chosen.can_be_compiled is expected
    declared = json.loads(chosen.loading["quantization_config"].to_json_string(use_diff=False))
    as_saved = choose_quantization(declared, None, **settings)
    assert as_saved is not None and as_saved.can_be_recorded is as_saved.can_be_compiled is expected


@pytest.mark.parametrize(("kind", "expected"), [("float", False), ("int", True)])
def test_float8_layers_of_compressed_tensors_are_not_compiled(
    kind: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    declared = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"type": kind, "num_bits": 8}}},
    }
    chosen = choose_quantization(
        declared, None, architecture=ARCHITECTURES[LLAMA], device=torch.device("cuda"), dtype=torch.bfloat16
    )
    assert chosen is not None and chosen.can_be_recorded and chosen.can_be_compiled is expected


# Adapters, plans and files


def test_dora_is_refused_in_the_same_words_with_and_without_weights(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dora = make_adapter(world.base(), LLAMA, tmp_path / "dora", use_dora=True)
    biased = make_adapter(world.base(QWEN), QWEN, tmp_path / "biased", bias="lora_only")
    folder = world.saved("bnb8", lambda: BitsAndBytesConfig(load_in_8bit=True))
    assert adapters_main(["inspect", str(dora), "--base", str(folder)]) == 1
    assert "DoRA needs the layer's own weight, which this model holds in a quantised form" in capsys.readouterr().out
    assert adapters_main(["inspect", str(world.adapter()), "--base", str(folder)]) == 0
    outlined = outline_model(str(folder)).surface(max_lora_rank=8, lora_dtype=torch.float32)
    loaded = load(folder).surface(max_lora_rank=8, lora_dtype=torch.float32)
    assert outlined.linears == loaded.linears
    for quantization in ("int8", "bitsandbytes"):
        engine = make_engine(world, QWEN, quantization=quantization)
        try:
            engine.adapters.load("biased", str(biased))  # A bias is added to the product, whatever computes that.
            with pytest.raises(AppError, match="holds in a quantised form"):
                engine.adapters.load("dora", str(dora))
        finally:
            engine.close()


def test_the_plan_counts_quantised_weights(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def weights(folder: Path, *words: str) -> int:
        assert engine_main(["plan", "--model", str(folder), "--max-loras", "1", "--json", *words]) == 0
        return int(json.loads(capsys.readouterr().out)["weights"])

    full, eight, four = [
        weights(world.base(), *words) for words in ([], ["--quantization", "int8"], ["--quantization", "int4"])
    ]
    assert four < eight < full
    assert eight == pytest.approx(load(world.base(), quantization="int8").num_bytes, rel=0.05)
    declared = weights(world.saved("bnb8", lambda: BitsAndBytesConfig(load_in_8bit=True)))
    assert declared == eight
    engine_main(["plan", "--model", str(world.base()), "--max-loras", "1", "--quantization", "int8"])
    assert "(float32, int8)" in (text := capsys.readouterr().out) and "not measured" in text
    assert engine_main(["plan", "--model", str(world.base()), "--quantization", "awq"]) == 2


def test_a_gguf_file_on_a_gpu_needs_its_own_package_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cuda"), []
    monkeypatch.setattr("engine.quantization._is_installed", lambda name: asked.append(name) or name == "gguf")
    choose = functools.partial(
        choose_quantization, asked=None, architecture=ARCHITECTURES[QWEN], device=device, dtype=torch.bfloat16
    )
    chosen = choose({"quant_method": "gguf"})
    assert chosen is not None and chosen.is_unpacked and "device_map" not in chosen.loading
    with pytest.raises(InvalidRequest, match="accelerate"):
        choose({"quant_method": "compressed-tensors"})
    assert asked


def test_a_gguf_file_needs_no_flag(world: World, tmp_path: Path) -> None:
    file = gguf_folder(world)[0]["model"] / "tiny.gguf"
    engine = make_engine(world, QWEN, model=file)
    try:
        assert engine.model_names == ("tiny",) and engine.config.gguf_file == "tiny.gguf"
    finally:
        engine.close()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InvalidRequest, match=r"holds 2 GGUF files \(a.gguf, b.gguf\); name one with --gguf-file"):
        make_engine(world, model=tmp_path)
