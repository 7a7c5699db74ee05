"""Loads a rank's share of a model by transformers' own tensor-parallel plan, and leaves plain layers behind.

transformers reads each rank's part of the checkpoint into DTensors and wraps the layers' `forward`. Both are taken off
again: what stays are plain linears with the rank's share of the weight, and forward hooks that sum or gather their outputs,
so that LoRA, compilation and recording find what they find on one GPU. Layers that the plan does not cut evenly, and
embeddings, are whole on every rank.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from engine.architectures import ARCHITECTURES, Architecture
from engine.errors import InvalidRequest, UnsupportedModel
from engine.parallel.collectives import RankGroup
from engine.parallel.shards import LinearShard, Share
from engine.parallel.split import Split

_JOINED = frozenset({"colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"})
_KINDS = {
    "colwise": "column", "colwise_gather_output": "column", "colwise_rep": "column",
    "rowwise": "row", "rowwise_split_input": "row", "rowwise_rep": "row",
}  # fmt: skip


class ShardedLoad:
    """How one rank loads its share; see `engine.model.load_model`.

    Args:
        rank, size: this process, and how many there are.
        connect: joins the process group on a device; called once it is known that the model can be split.

    Attributes:
        shards: the linears that are cut, by module name; filled by the load.
        group: the ranks.
    """

    def __init__(self, rank: int, size: int, connect: Callable[[torch.device], None]) -> None:
        self.rank = rank
        self.size = size
        self.shards: dict[str, LinearShard] = {}
        self.group = RankGroup(rank, size)
        self._connect = connect

    @property
    def split(self) -> Split:
        """How the loaded model is cut."""
        return Split(self.shards, self.group)

    def begin(self, architecture: Architecture, config: PretrainedConfig, device: torch.device) -> None:
        """Check that the model can be split, and join the group.

        Raises:
            UnsupportedModel: models of this kind are not split.
            InvalidRequest: the model does not go into so many parts, or the machine lacks GPUs.
        """
        _check_model(architecture, config, self.size)
        _check_machine(device, self.size)
        self._connect(device)

    @property
    def arguments(self) -> dict[str, Any]:
        """What `from_pretrained` takes beside the usual."""
        from transformers.distributed.configuration_utils import DistributedConfig

        if self.rank:
            transformers.utils.logging.disable_progress_bar()
        return {"distributed_config": DistributedConfig(tp_size=self.size, tp_plan="auto")}

    def localise(self, model: PreTrainedModel) -> None:
        """Turn what transformers loaded into plain local layers, and note the shards."""
        group, plan = self.group, _Plan(model)
        whole: dict[int, nn.Parameter] = {}
        for name, module in model.named_modules():
            shard = plan.shard_of(name, module, self.size)
            for key, parameter in list(module._parameters.items()):
                if isinstance(parameter, DTensor):
                    if id(parameter) not in whole:  # Tied weights stay one.
                        local = parameter.to_local() if shard is not None else parameter.full_tensor()
                        whole[id(parameter)] = nn.Parameter(local.contiguous(), requires_grad=False)
                    module._parameters[key] = whole[id(parameter)]
            module.__dict__.pop("forward", None)
            if shard is not None:
                self.shards[name] = shard
                _join_outputs(module, shard, group)
        model.config.distributed_config = None  # The model is a plain one from here on.

    def random_model(
        self, model_class: Any, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int
    ) -> PreTrainedModel:
        """A model with random weights; each weight is made on the device, one after the other, and only its share kept.

        Weights follow the seed and their names alone, so all ranks have parts of one model, whatever their number.
        """
        with torch.device("meta"):
            model: PreTrainedModel = model_class._from_config(config, dtype=dtype)
        group, plan, share = self.group, _Plan(model), Share(self.rank, self.size)
        std = float(getattr(config.get_text_config(), "initializer_range", 0.02))
        for name, module in model.named_modules():
            shard = plan.shard_of(name, module, self.size)
            for key, parameter in list(module._parameters.items()):
                if parameter is not None:
                    weight = _random(parameter, f"{name}.{key}", std, device, seed)
                    if shard is not None:
                        weight = _cut(weight, shard, share).clone()
                    module._parameters[key] = nn.Parameter(weight, requires_grad=False)
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                _remake_buffers(model, name, device)
            if shard is not None:
                self.shards[name] = shard
                _join_outputs(module, shard, group)
        model.tie_weights()
        return model


def outline_split(model: PreTrainedModel, architecture: Architecture, size: int) -> Split:
    """How a whole model would be cut into `size` shares, for sums that need no weights.

    Raises:
        UnsupportedModel, InvalidRequest: it cannot be.
    """
    _check_model(architecture, model.config, size)
    plan = _Plan(model)
    shards = {name: plan.shard_of(name, module, size) for name, module in model.named_modules()}
    return Split({name: shard for name, shard in shards.items() if shard is not None}, RankGroup(0, size))


class _Plan:
    """transformers' plan of a model, by module."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._styles: Mapping[str, str] = dict(model.tp_plan)
        head = model.get_output_embeddings()
        self._is_tied = head is not None and head.weight is model.get_input_embeddings().weight
        self._head = head

    def shard_of(self, name: str, module: nn.Module, size: int) -> LinearShard | None:
        """How a module is cut; None where it is whole on every rank."""
        style = self._styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
        kind = _KINDS.get(style)
        if kind is None or not isinstance(module, nn.Linear) or (module is self._head and self._is_tied):
            return None
        # The attributes, not the weight's shape: a DTensor's local shape may be another.
        shard = LinearShard(kind, module.in_features, module.out_features, style in _JOINED)  # type: ignore[arg-type]
        if (shard.out_features if kind == "column" else shard.in_features) % size:
            return None
        return shard


def _join_outputs(module: nn.Module, shard: LinearShard, group: RankGroup) -> None:
    """Make a linear with a share of its weight compute what its neighbours expect."""
    assert isinstance(module, nn.Linear), "only linears are cut"
    share = Share(group.rank, group.size)
    if shard.kind == "column":
        module.out_features = shard.out_features // group.size
        if shard.is_joined:
            module.register_forward_hook(lambda _module, _inputs, output: group.join(output))
        return
    module.in_features = shard.in_features // group.size
    bias = module._parameters["bias"]
    module._parameters["bias"] = None  # Added once, after the sum.

    def finish(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        group.sum_(output)
        return output if bias is None else output + bias

    if shard.is_joined:
        own = share.of(shard.in_features)
        module.register_forward_pre_hook(lambda _module, inputs: (inputs[0][..., own].contiguous(),))
    module.register_forward_hook(finish)


def _cut(weight: torch.Tensor, shard: LinearShard, share: Share) -> torch.Tensor:
    """A rank's part of a whole weight or bias."""
    if shard.kind == "column":
        return weight[share.of(shard.out_features)]
    return weight if weight.ndim == 1 else weight[:, share.of(shard.in_features)]


def _random(like: torch.Tensor, name: str, std: float, device: torch.device, seed: int) -> torch.Tensor:
    """Whole random weights by their name; norms are ones, biases zeros."""
    if like.ndim == 1:
        fill = 0.0 if name.endswith(".bias") else 1.0
        return torch.full(like.shape, fill, dtype=like.dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    return torch.empty(like.shape, dtype=like.dtype, device=device).normal_(0.0, std, generator=generator)


def _remake_buffers(model: PreTrainedModel, name: str, device: torch.device) -> None:
    """Give a module that was built without memory its buffers: those of rotary embeddings follow from the config."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(name)
    if leaf != "rotary_emb":
        raise UnsupportedModel(f"Random weights with --tensor-parallel-size: {name} has numbers that no rule makes.")
    with device:
        remade = type(module)(config=model.config.get_text_config())
    setattr(model.get_submodule(parent), leaf, remade)


def split_architectures() -> Iterator[str]:
    """Classes of models that can be split."""
    return (name for name, architecture in ARCHITECTURES.items() if architecture.is_split)


def _check_model(architecture: Architecture, config: PretrainedConfig, size: int) -> None:
    if not architecture.is_split:
        raise UnsupportedModel(
            f"--tensor-parallel-size {size} is not served for {architecture.class_name}; it is for "
            f"{', '.join(split_architectures())}. Leave the flag out, or take one of these.",
            param="tensor_parallel_size",
        )
    text = config.get_text_config()
    plan: Mapping[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise UnsupportedModel(
            f"transformers {transformers.__version__} has no tensor-parallel plan for {architecture.class_name}.",
            param="tensor_parallel_size",
        )
    counts = {"num_attention_heads": text.num_attention_heads, "intermediate_size": text.intermediate_size}
    if _splits_heads(plan):
        counts["num_key_value_heads"] = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    for name, count in counts.items():
        if count % size:
            fits = ", ".join(str(number) for number in range(1, 17) if not any(c % number for c in counts.values()))
            raise InvalidRequest(
                f"--tensor-parallel-size is {size}, but must divide the model's {name}, which is {count}; take one of {fits}.",
                param="tensor_parallel_size",
            )


def _splits_heads(plan: Mapping[str, str]) -> bool:
    """Whether each rank computes the attention of its own heads."""
    return any(name.endswith(".k_proj") and style == "colwise" for name, style in plan.items())


def _check_machine(device: torch.device, size: int) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise InvalidRequest(
            f"--tensor-parallel-size is {size}, but torch sees {torch.cuda.device_count()} GPUs on this machine.",
            param="tensor_parallel_size",
        )
    if device.type == "cpu" and torch.cuda.is_available():
        raise InvalidRequest(
            "--tensor-parallel-size on a CPU needs a machine without GPUs, or CUDA_VISIBLE_DEVICES set to nothing.",
            param="tensor_parallel_size",
        )
