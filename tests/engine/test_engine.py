"""The engine as its callers see it: routing with receipts, caches, stops, aborts, faults, and the offline API."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from adapters.errors import AdapterNotFound
from engine import LLM, Engine, EngineConfig, LoRARequest, SamplingParams
from engine.answer import Answer
from engine.config import LoRAModule
from engine.errors import AppError, ContextTooLong, EngineFault, InvalidRequest, ModelNotFound, UnsupportedModel
from engine.recording import Joint
from engine.request import AudioPart, ChatPrompt, Delta, Message, TextPart, TextPrompt, TokenPrompt
from tests.oracles import make_adapter, make_model, random_ids, tone
from tests.pace import held_after

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LLAMA = "LlamaForCausalLM"


def run(answer: Answer) -> tuple[str, list[int]]:
    deltas = list(answer)
    return "".join(delta.text for delta in deltas), [token_id for delta in deltas for token_id in delta.token_ids]


def audio_chat(*clips: np.ndarray, text: str = "what?") -> ChatPrompt:
    return ChatPrompt([Message("user", [*[AudioPart((clip, 16_000)) for clip in clips], TextPart(text)])])


def one(engine: Engine, prompt: Any, sampling: SamplingParams = GREEDY, **named: Any) -> Answer:
    return engine.start_sync(prompt, sampling, **named)[0]


# Routing and receipts


def test_audio_picks_its_default_and_the_receipt_says_so(tiny_engine: Engine) -> None:
    answer = one(tiny_engine, audio_chat(tone(0.5)))
    deltas = list(answer)
    receipt = deltas[0].receipt
    assert receipt is not None and deltas[0].text == "" and not deltas[0].token_ids
    assert (receipt.name, receipt.reason) == ("speech", "default:audio")
    assert receipt.generation is not None and receipt.generation.startswith("sha256:")
    assert receipt == answer.receipt and receipt.queue_ms >= 0
    assert deltas[-1].finish_reason == "length" and answer.num_output_tokens == 12


def test_opting_out_gives_the_base_models_tokens(tiny_engine: Engine) -> None:
    clip = tone(0.5)
    default, base, named = (run(one(tiny_engine, audio_chat(clip), lora=lora))[1] for lora in (None, "none", "speech"))
    assert default == named != base
    assert one(tiny_engine, audio_chat(clip), lora="none").receipt.reason == "opt-out"


def test_audio_in_an_earlier_turn_counts(tiny_engine: Engine) -> None:
    messages = [*audio_chat(tone(0.4)).messages, Message("assistant", "a tone"), Message("user", "and now?")]
    assert one(tiny_engine, ChatPrompt(messages)).receipt.reason == "default:audio"


def test_raw_prompts_follow_the_same_rule(tiny_engine: Engine) -> None:
    prompt = TextPrompt("<|audio|>what?", [AudioPart((tone(0.4), 16_000))])
    assert one(tiny_engine, prompt).receipt.reason == "default:audio"
    assert one(tiny_engine, TextPrompt("what?")).receipt.reason == "base"


def test_unknown_names_raise(tiny_engine: Engine) -> None:
    for named in ({"model": "nope"}, {"lora": "nope"}):
        with pytest.raises(ModelNotFound):
            one(tiny_engine, TextPrompt("x"), **named)


# Caches


def logprobs(answer: Answer) -> list[float]:
    return [entry.logprob for delta in answer for entry in delta.logprobs]


def test_the_same_clip_hits_both_caches_and_another_does_not(tiny_engine: Engine) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    clip, other = tone(1.0, 610), tone(1.0, 620)
    first = logprobs(one(tiny_engine, audio_chat(clip), sampling))
    misses = tiny_engine.stats().encoder_misses
    again = one(tiny_engine, audio_chat(clip), sampling)
    assert logprobs(again) == pytest.approx(first, abs=1e-4)
    assert again.receipt.cached_tokens > 0 and tiny_engine.stats().encoder_misses == misses
    different = one(tiny_engine, audio_chat(other), sampling)
    assert logprobs(different) != pytest.approx(first, abs=1e-4)
    span_start = different.prompt_token_ids.index(260)
    assert different.receipt.cached_tokens <= span_start, "KV of another clip was used"
    assert tiny_engine.stats().encoder_misses == misses + 1


def test_features_are_shared_between_adapters_unless_one_changes_the_tower(tiny_engine: Engine) -> None:
    clip = tone(0.7, 700)
    misses = [tiny_engine.stats().encoder_misses]
    for name in ("none", "speech", "style", "tower", "tower"):
        run(one(tiny_engine, audio_chat(clip), lora=name))
        misses.append(tiny_engine.stats().encoder_misses)
    assert [after - before for before, after in itertools.pairwise(misses)] == [1, 0, 0, 1, 0]


def test_replacing_an_adapter_never_answers_from_old_keys(llama_dir: Path, tmp_path: Path) -> None:
    first = make_adapter(llama_dir, LLAMA, tmp_path / "one", seed=21)
    second = make_adapter(llama_dir, LLAMA, tmp_path / "two", seed=22)
    prompt = TokenPrompt(random_ids(50, 1))

    def fresh(path: Path) -> list[int]:
        engine = Engine(EngineConfig(model=str(llama_dir), adapter_dir=str(tmp_path / path.name / "catalogue")))
        engine.adapters.load("x", str(path))
        tokens = run(one(engine, prompt, lora="x"))[1]
        engine.close()
        return tokens

    expected = [fresh(first), fresh(second)]
    assert expected[0] != expected[1]
    engine = Engine(EngineConfig(model=str(llama_dir), adapter_dir=str(tmp_path / "catalogue")), checks_integrity=True)
    try:
        engine.adapters.load("x", str(first))
        assert run(one(engine, prompt, lora="x"))[1] == expected[0]
        engine.adapters.load("x", str(second), load_inplace=True)
        replaced = one(engine, prompt, lora="x")
        assert run(replaced)[1] == expected[1] and replaced.receipt.cached_tokens == 0
        again = one(engine, prompt, lora="x")
        assert run(again)[1] == expected[1] and again.receipt.cached_tokens == 48
        engine.adapters.unload("x")
        with pytest.raises((ModelNotFound, AdapterNotFound)):
            one(engine, prompt, lora="x")
    finally:
        engine.close()


def test_a_running_request_keeps_its_generation_while_the_name_moves_on(llama_dir: Path, tmp_path: Path) -> None:
    first = make_adapter(llama_dir, LLAMA, tmp_path / "one", seed=21)
    second = make_adapter(llama_dir, LLAMA, tmp_path / "two", seed=22)
    engine = Engine(EngineConfig(model=str(llama_dir), adapter_dir=str(tmp_path / "catalogue")), checks_integrity=True)
    prompt, sampling = TokenPrompt(random_ids(9, 1)), SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    try:
        engine.adapters.load("x", str(first))
        undisturbed = run(one(engine, prompt, sampling, lora="x"))[1]
        answer = one(engine, prompt, sampling, lora="x")
        events = iter(answer)
        next(events)
        engine.adapters.load("x", str(second), load_inplace=True)
        tokens = [token_id for delta in events for token_id in delta.token_ids]
        assert tokens == undisturbed != run(one(engine, prompt, sampling, lora="x"))[1]
    finally:
        engine.close()


# Text


def test_stop_strings_end_the_answer_and_leak_nothing(tiny_engine: Engine) -> None:
    prompt, sampling = TextPrompt("tell"), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    full = run(one(tiny_engine, prompt, sampling))[0]
    stop = full[20:23]
    answer = one(
        tiny_engine, prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=[stop, "\0never"])
    )
    deltas = list(answer)
    assert "".join(delta.text for delta in deltas) == full[: full.index(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)


def test_the_end_token_ends_the_answer_without_its_text(tiny_engine: Engine) -> None:
    eos = tiny_engine.tokenizer.eos_token_id
    sampling = SamplingParams(temperature=0, max_tokens=9, logit_bias={eos: 100.0})
    text, token_ids = run(one(tiny_engine, TextPrompt("x"), sampling))
    assert (text, token_ids) == ("", [eos])


def test_seeded_answers_do_not_depend_on_the_batch(tiny_engine: Engine) -> None:
    sampling = SamplingParams(temperature=1.5, top_p=0.9, seed=7, max_tokens=15, ignore_eos=True)
    alone = run(one(tiny_engine, TextPrompt("hello"), sampling))[1]
    answers = [one(tiny_engine, TextPrompt("hello"), sampling, lora=name) for name in (None, "style", "tower", None)]
    outputs = [run(answer)[1] for answer in answers]
    assert outputs[0] == outputs[3] == alone
    several = [run(answer)[1] for answer in tiny_engine.start_sync(TextPrompt("hello"), sampling, n=3)]
    assert several[0] == alone and len(set(map(tuple, several))) == 3


def test_text_is_the_decoding_of_the_tokens(tiny_engine: Engine) -> None:
    sampling = SamplingParams(temperature=2.0, seed=3, max_tokens=200, ignore_eos=True)
    text, token_ids = run(one(tiny_engine, TextPrompt("x"), sampling))
    assert text == tiny_engine.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# Ends


def test_abort_frees_the_request_within_a_step(tiny_engine: Engine) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with held_after(tiny_engine, 3):
        answer = one(tiny_engine, TextPrompt("x"), sampling, lora="style")
        events = iter(answer)
        for _ in range(3):
            next(events)
        answer.abort()
        rest = list(events)
    assert rest[-1].finish_reason == "abort"
    stats = tiny_engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


def test_leaving_an_async_stream_aborts_it(tiny_engine: Engine) -> None:
    async def read_two() -> Answer:
        sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        (answer,) = await tiny_engine.start(TextPrompt("x"), sampling)
        events = aiter(answer)
        await anext(events)
        await anext(events)
        await events.aclose()  # type: ignore[attr-defined]
        return answer

    aborted = tiny_engine.stats().num_finished.get("abort", 0)
    with held_after(tiny_engine):
        asyncio.run(read_two())
    run(one(tiny_engine, TextPrompt("y")))
    assert tiny_engine.stats().num_finished["abort"] == aborted + 1


def test_many_readers_in_threads_and_coroutines_get_their_own_answers(tiny_engine: Engine) -> None:
    prompts = [TextPrompt(f"question {number}") for number in range(12)]
    expected = [run(one(tiny_engine, prompt))[1] for prompt in prompts]
    results: dict[int, list[int]] = {}

    def in_thread(number: int) -> None:
        results[number] = run(one(tiny_engine, prompts[number]))[1]

    async def in_coroutine(number: int) -> None:
        (answer,) = await tiny_engine.start(prompts[number], GREEDY)
        results[number] = [token_id async for delta in answer for token_id in delta.token_ids]

    async def all_coroutines() -> None:
        await asyncio.gather(*[in_coroutine(number) for number in range(6, 12)])

    threads = [threading.Thread(target=in_thread, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    asyncio.run(all_coroutines())
    for thread in threads:
        thread.join()
    assert [results[number] for number in range(12)] == expected


def test_a_prompt_that_does_not_fit_is_refused_before_any_work(tiny_engine: Engine) -> None:
    length = tiny_engine.max_model_len
    for prompt_len, max_tokens in ((length, 1), (length - 5, 6), (length + 1, None)):
        with pytest.raises(ContextTooLong):
            one(tiny_engine, TokenPrompt([1] * prompt_len), SamplingParams(max_tokens=max_tokens))
    assert (
        len(run(one(tiny_engine, TokenPrompt([1] * (length - 5)), SamplingParams(max_tokens=5, ignore_eos=True)))[1])
        == 5
    )


# Faults


def test_a_failing_step_fails_its_requests_and_not_the_loop(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(one(tiny_engine, TextPrompt("z")))[1]

    def broken(*_: Any) -> Any:
        raise RuntimeError("no memory, say")

    with monkeypatch.context() as patch:
        patch.setattr(type(tiny_engine.base), "decode", broken)
        answer = one(tiny_engine, TextPrompt("z"), lora="style")
        with pytest.raises(EngineFault) as caught:
            list(answer)
    assert "no memory" not in caught.value.message
    assert run(one(tiny_engine, TextPrompt("z")))[1] == expected
    assert tiny_engine.stats().kv_blocks_used == 0


def test_numbers_gone_wrong_fail_one_request_and_reach_no_other(llama_dir: Path, tmp_path: Path) -> None:
    broken = make_adapter(llama_dir, LLAMA, tmp_path / "broken", std=3e18, seed=5)
    engine = Engine(EngineConfig(model=str(llama_dir), adapter_dir=str(tmp_path / "catalogue")), checks_integrity=True)
    try:
        engine.adapters.load("broken", str(broken))
        prompts = [TokenPrompt(random_ids(length, length)) for length in (30, 5, 40)]
        expected = [run(one(engine, prompt))[1] for prompt in prompts]
        for _ in range(3):
            bad = [one(engine, prompt, lora="broken") for prompt in prompts]
            good = [one(engine, prompt) for prompt in prompts]
            for answer in bad:
                with pytest.raises(EngineFault, match="not a number"):
                    run(answer)
            assert [run(answer)[1] for answer in good] == expected
    finally:
        engine.close()


def test_a_fault_in_one_requests_text_fails_that_request_alone(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine import delivery

    class Broken(delivery.Detokenizer):
        def push(self, token_id: int) -> str:
            raise ValueError("bad token")

    expected = run(one(tiny_engine, TextPrompt("good")))[1]
    with monkeypatch.context() as patch:
        patch.setattr(delivery, "Detokenizer", Broken)
        bad = one(tiny_engine, TextPrompt("bad"))
    good = one(tiny_engine, TextPrompt("good"))
    with pytest.raises(EngineFault):
        run(bad)
    assert run(good)[1] == expected


def test_architectures_that_are_not_listed_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel.*LlamaForCausalLM"):
        Engine(EngineConfig(model=str(tmp_path)))


def test_ropes_that_follow_the_longest_neighbour_are_refused(tmp_path: Path) -> None:
    folder = make_model(LLAMA, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="dynamic"):
        Engine(EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_cpu_loras": 2, "max_loras": 4}, "--max-cpu-loras is 2"),
        ({"max_loras": 0, "max_cpu_loras": 4}, "--max-loras is 0"),
        ({"dtype": "int3"}, "--dtype is 'int3'"),
        ({"quantization": "awq"}, "the checkpoint is not quantised with it"),
        ({"default_mm_loras": {"audio": "x"}}, "the model takes no media"),
        ({"enable_lora": False, "default_mm_loras": {"audio": "x"}}, "--no-enable-lora"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_remedy(
    llama_dir: Path, tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidRequest, match=match):
        Engine(EngineConfig(model=str(llama_dir), adapter_dir=str(tmp_path), **settings))


def test_a_path_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No base model could be loaded") as caught:
        Engine(EngineConfig(model=str(tmp_path)))
    assert "\n" not in caught.value.message


def test_dummy_weights_need_only_a_config(llama_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((llama_dir / name).read_bytes())
    engine = Engine(EngineConfig(model=str(tmp_path), load_format="dummy", adapter_dir=str(tmp_path / "x")))
    assert len(run(one(engine, TokenPrompt([1, 2, 3])))[1]) == 12
    engine.close()


def test_a_context_that_the_cache_cannot_hold_is_refused_or_shortened(llama_dir: Path, tmp_path: Path) -> None:
    config = json.loads((llama_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100_000}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((llama_dir / name).read_bytes())
    settings = {
        "model": str(tmp_path),
        "load_format": "dummy",
        "kv_cache_memory_mb": 1,
        "adapter_dir": str(tmp_path / "x"),
    }
    with pytest.raises(InvalidRequest, match="--kv-cache-memory-mb"):
        Engine(EngineConfig(**settings, max_model_len=50_000))
    engine = Engine(EngineConfig(**settings))
    assert 1000 < engine.max_model_len < 5000
    engine.close()


def test_bfloat16_follows_float32_closely(llama_dir: Path, tmp_path: Path) -> None:
    """The first token's distribution agrees; later greedy tokens may part ways at near ties."""
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=1, ignore_eos=True)
    found = {}
    for dtype in ("float32", "bfloat16"):
        engine = Engine(EngineConfig(model=str(llama_dir), dtype=dtype, adapter_dir=str(tmp_path)))
        assert engine.base.dtype is getattr(torch, dtype)
        (entry,) = [
            entry for delta in one(engine, TokenPrompt(random_ids(40, 2)), sampling) for entry in delta.logprobs
        ]
        found[dtype] = entry
        engine.close()
    assert found["float32"].logprob == pytest.approx(found["bfloat16"].logprob, abs=0.1)


def test_closing_ends_every_answer(llama_dir: Path, tmp_path: Path) -> None:
    engine = Engine(EngineConfig(model=str(llama_dir), adapter_dir=str(tmp_path)))
    sampling = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with held_after(engine):
        answers = [one(engine, TokenPrompt([1, 2, number]), sampling) for number in range(4)]
        events = [iter(answer) for answer in answers]
        assert isinstance(next(events[0]), Delta)
        engine.close(drain_s=0.0)
    from engine.errors import EngineClosed

    for event in events:
        with pytest.raises(EngineClosed):
            list(event)
    with pytest.raises(EngineClosed):
        one(engine, TokenPrompt([1]))


# Offline API


def test_the_offline_api_mixes_adapters_and_routes_audio_by_itself(
    speech_dir: Path, speech_adapters: dict[str, Path], tmp_path: Path
) -> None:
    llm = LLM(
        model=str(speech_dir), max_lora_rank=64, max_model_len=256, limit_mm_per_prompt={"audio": 1},
        default_mm_loras={"audio": str(speech_adapters["speech"])}, adapter_dir=str(tmp_path),
    )  # fmt: skip
    try:
        style = LoRARequest("style", 1, str(speech_adapters["style"]))
        sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        with_audio = {"prompt": "<|audio|>what?", "multi_modal_data": {"audio": (tone(0.6), 16_000)}}
        plain, styled, spoken = llm.generate(["hello", "hello", with_audio], sampling, lora_request=[None, style, None])
        assert plain.outputs[0].token_ids != styled.outputs[0].token_ids
        assert (plain.lora_request, styled.lora_request) == (None, style)
        assert spoken.lora_request is not None and spoken.lora_request.lora_name == "audio"
        assert spoken.receipt.reason == "default:audio" and spoken.outputs[0].finish_reason == "length"
        chat = llm.chat([{"role": "user", "content": [{"type": "audio", "audio": (tone(0.6), 16_000)}]}], sampling)
        assert chat[0].receipt.reason == "default:audio"
        two_clips = {"prompt": "<|audio|><|audio|>", "multi_modal_data": {"audio": [(tone(0.6), 16_000)] * 2}}
        with pytest.raises(InvalidRequest.__mro__[1], match="more than 1 audio"):
            llm.generate(two_clips, sampling)
    finally:
        llm.close()


def test_the_offline_api_transcribes_recordings_longer_than_the_window(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm = LLM.__new__(LLM)
    llm.engine = tiny_engine
    monkeypatch.setitem(tiny_engine.recordings.__dict__, "window_seconds", 2.0)
    monkeypatch.setattr(tiny_engine, "config", replace(tiny_engine.config, max_num_seqs=2))
    pause = np.zeros(12_800, np.float32)
    tones = [tone(seconds, pitch=pitch) for seconds, pitch in ((0.7, 220), (1.1, 330), (0.5, 440))]
    recording = np.concatenate([part for sound in tones for part in (pause, sound)])
    sampling = SamplingParams(temperature=0, max_tokens=9)
    output = llm.transcribe((recording, 16_000), sampling)
    read = tiny_engine.recordings.read(AudioPart((recording, 16_000)))
    alone = []
    for piece in read.pieces:
        [answer] = tiny_engine.start_sync(tiny_engine.transcription_prompt(read.part(piece)), sampling)
        alone.append("".join(delta.text for delta in answer))
    assert len(alone) == 3 and len(set(alone)) > 1
    assert [segment.text for segment in output.segments] == alone
    joint = Joint()
    assert output.text == "".join(joint.before(index, text) + text for index, text in enumerate(alone))
    starts = np.cumsum([0.8, 0.7 + 0.8, 1.1 + 0.8])
    assert np.abs(starts - [segment.start for segment in output.segments]).max() < 0.03
    assert output.duration == recording.size / 16_000
    assert output.lora_request is not None and output.lora_request.lora_name == "speech"
    assert llm.transcribe((recording, 16_000), sampling, lora_request=LoRARequest("none")).lora_request is None
    soundfile.write(tmp_path / "a.wav", recording, 16_000, subtype="FLOAT")
    assert llm.transcribe(str(tmp_path / "a.wav"), sampling).segments == output.segments
    nothing = llm.transcribe((np.zeros(80_000, np.float32), 16_000))
    assert (nothing.text, nothing.segments, nothing.duration) == ("", (), 5.0)
    with pytest.raises(InvalidRequest, match="does not use language"):
        llm.transcribe((recording, 16_000), language="en")
    tiny_engine.check_integrity()


def test_unknown_settings_of_the_offline_api_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no setting max_lora"):
        LLM(model="x", max_lora=1)


def test_a_program_may_end_or_drop_its_engine_without_closing_it(llama_dir: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    program = f"""
import gc, threading
from engine import LLM, SamplingParams
llm = LLM(model={str(llama_dir)!r}, adapter_dir={str(tmp_path)!r})
llm.generate("x", SamplingParams(max_tokens=3))
del llm
gc.collect()
assert not any(thread.name == "engine" for thread in threading.enumerate())
llm = LLM(model={str(llama_dir)!r}, adapter_dir={str(tmp_path)!r})
answers = llm.engine.start_sync(__import__("engine.request", fromlist=["x"]).TextPrompt("x"), SamplingParams(max_tokens=None))
next(iter(answers[0]))
"""
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr


# What start-up and answers say


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"model": "/no/such/folder"}, "--model /no/such/folder: there is no such folder"),
        ({"gguf_file": "x.gguf"}, "--gguf-file x.gguf: the model's folder has no such file"),
        ({"max_model_len": 513}, "--max-model-len is 513, but the model was made for 512 tokens"),
        ({"default_mm_loras": {"audio": "nope"}}, r"--default-mm-loras audio=nope \(no adapter has that name\)"),
    ],
)
def test_start_up_faults_name_the_setting(
    speech_dir: Path, tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(AppError) as caught:
        Engine(EngineConfig(**{"model": str(speech_dir), "adapter_dir": str(tmp_path), **settings}))
    assert re.search(match, caught.value.message), caught.value.message


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lora_modules": [LoRAModule("sql", "/none")]}, "--lora-modules sql=/none: no folder was found"),
        ({"lora_modules": [LoRAModule("sql", "./none")]}, "--lora-modules sql=./none: no folder was found"),
        ({"default_mm_loras": {"audio": "~/none"}}, "--default-mm-loras audio=~/none: no folder was found"),
        (
            {"default_mm_loras": {"audio": "~nobody-here/x"}},
            "--default-mm-loras audio=~nobody-here/x: no folder was found",
        ),
        ({"lora_modules": [LoRAModule("sql", "/" + "x" * 5000)]}, "--lora-modules sql=/x+: no folder was found"),
    ],
)
def test_paths_without_a_folder_are_told_before_the_model_is_loaded(
    speech_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], match: str
) -> None:
    monkeypatch.setattr("engine.engine.load_base", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(AppError, match=match):
        Engine(EngineConfig(model=str(speech_dir), adapter_dir=str(tmp_path), **settings))


def test_a_default_that_is_gone_is_named_and_never_answered_by_the_base(
    speech_dir: Path, speech_adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = Engine(
        EngineConfig(
            model=str(speech_dir), lora_modules=[LoRAModule("speech", str(speech_adapters["speech"]))],
            default_mm_loras={"audio": "speech"}, adapter_dir=str(tmp_path),
        )
    )  # fmt: skip
    try:
        engine.adapters.unload("speech")
        with pytest.raises(ModelNotFound, match="default adapter for audio, 'speech', is not loaded; load it again"):
            one(engine, audio_chat(tone(0.5)))
        assert one(engine, audio_chat(tone(0.5)), lora="none").receipt.reason == "opt-out"
        with pytest.raises(ModelNotFound, match="The adapter 'speech' does not exist"):
            one(engine, audio_chat(tone(0.5)), lora="speech")
    finally:
        engine.close()


def test_a_transcript_is_bounded_by_the_length_of_the_audio(tiny_engine: Engine) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for seconds in (0.5, 3.0):
        answer = one(tiny_engine, tiny_engine.transcription_prompt(AudioPart((tone(seconds), 16_000))), sampling)
        run(answer)
        assert answer.num_output_tokens == 32 + answer.prompt_token_ids.count(260)


def test_the_transcript_of_silence_is_empty_and_holds_nothing(tiny_engine: Engine) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=None)
    silence = AudioPart((np.zeros(48_000, np.float32), 16_000))
    answer = one(tiny_engine, tiny_engine.transcription_prompt(silence), sampling)
    assert run(answer) == ("", []) and answer.finish_reason == "stop" and answer.receipt.reason == "default:audio"
    tiny_engine.adapters.check_integrity()
    heard = one(tiny_engine, tiny_engine.transcription_prompt(AudioPart((tone(0.5), 16_000))), sampling)
    assert run(heard)[1]


# Slow adapters


def test_many_requests_for_a_slow_adapter_do_not_hold_up_other_starts(
    llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adapters import intake

    engine = Engine(
        EngineConfig(model=str(llama_dir), adapter_dir=str(tmp_path), max_loras=1, max_cpu_loras=1),
        checks_integrity=True,
    )
    real, is_reached, is_open = intake.read_adapter, threading.Event(), threading.Event()

    def slow(*args: Any, **named: Any) -> Any:
        is_reached.set()
        assert is_open.wait(120)
        return real(*args, **named)

    async def ask(name: str) -> list[int]:
        (answer,) = await engine.start(TextPrompt("x"), GREEDY, lora=name)
        return [token_id async for delta in answer for token_id in delta.token_ids]

    async def scene() -> tuple[list[int], list[list[int]]]:
        waiting = [asyncio.create_task(ask("slow")) for _ in range(48)]
        assert await asyncio.to_thread(is_reached.wait, 120)
        other = await asyncio.wait_for(ask("none"), 120)
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()
        is_open.set()
        return other, await asyncio.gather(*waiting[1:])

    try:
        engine.adapters.load("slow", str(llama_adapters["all"]))
        expected = run(one(engine, TextPrompt("x"), lora="slow"))[1]
        engine.adapters.load("other", str(llama_adapters["qv"]))
        assert engine.adapters.get("slow").state in ("disk", "gpu")
        monkeypatch.setattr(intake, "read_adapter", slow)
        base, answers = asyncio.run(scene())
        assert answers == [expected] * 47 and base != expected
        assert engine.adapters.get("slow").num_loads == 2
    finally:
        is_open.set()
        engine.close()
    engine.check_integrity()
    assert engine.adapters.stats().num_cpu == 1


def test_offline_a_name_never_answers_for_another_path(
    speech_dir: Path, speech_adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(speech_dir), adapter_dir=str(tmp_path / "catalogue"))
    style, other = speech_adapters["style"], tmp_path / "other"
    shutil.copytree(style, other)
    try:
        greedy = SamplingParams(temperature=0, max_tokens=2)
        llm.generate("hello", greedy, lora_request=LoRARequest("mine", 1, str(style)))
        monkeypatch.chdir(style.parent)
        for same in (style.name, f"./{style.name}/", ""):
            llm.generate("hello", greedy, lora_request=LoRARequest("mine", 1, same))
        with pytest.raises(InvalidRequest, match=r"'mine'.*use another name"):
            llm.generate("hello", greedy, lora_request=LoRARequest("mine", 2, str(other)))
        pair = [LoRARequest("two", 1, str(style)), LoRARequest("two", 2, str(other))]
        with pytest.raises(InvalidRequest, match=r"'two'.*use another name"):
            llm.generate(["hello", "hello"], greedy, lora_request=pair)
    finally:
        llm.close()


def test_offline_load_inplace_reads_the_path_anew_and_replaces_what_the_name_meant(
    speech_dir: Path, speech_adapters: dict[str, Path], tmp_path: Path
) -> None:
    llm = LLM(str(speech_dir), adapter_dir=str(tmp_path / "catalogue"))
    folder, other = tmp_path / "mine", tmp_path / "other"

    def write(path: Path, alpha: int) -> None:
        shutil.copytree(speech_adapters["style"], path, dirs_exist_ok=True)
        config = path / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": alpha}))

    def used(*requests: LoRARequest) -> list[str | None]:
        outputs = llm.generate(
            ["hello"] * len(requests), SamplingParams(temperature=0, max_tokens=2), lora_request=requests
        )
        return [output.receipt.generation for output in outputs]

    try:
        write(folder, 2)
        write(other, 3)
        plain, anew = LoRARequest("mine", 1, str(folder)), LoRARequest("mine", 1, str(folder), load_inplace=True)
        [first] = used(anew)
        write(folder, 4)
        assert used(plain) == [first]
        [second, same] = used(plain, anew)
        assert second == same != first and used(plain) == [second]
        [third] = used(LoRARequest("mine", 1, str(other), load_inplace=True))
        assert third not in (first, second) and used(LoRARequest("mine")) == [third]
        with pytest.raises(InvalidRequest, match="without a lora_path"):
            used(LoRARequest("mine", load_inplace=True))
        with pytest.raises(InvalidRequest, match="two paths in one call"):
            used(anew, LoRARequest("mine", 1, str(other), load_inplace=True))
        assert used(LoRARequest("mine")) == [third]
    finally:
        llm.close()
