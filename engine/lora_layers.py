"""Makes a model's linear layers LoRA-aware, and holds the adapters' weights that the kernels read.

A linear becomes LoRA-aware by a change of its class, so names, tied weights and saving stay as they are, and whatever a
quantised class computes stays its own business. Plain linears that read the same input (q, k and v; gate and up) form a
group: one base product and one LoRA add serve all of them. Every group
has fixed buffers with one row an adapter; a step's metadata says which packed tokens use which row. Owns the buffers;
which adapter lies in which row is `adapters/slots`' business, which writes through `LoraBuffers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import nn

from adapters.surface import LinearSite
from engine import cpu_linear, ops
from engine.linears import device_of, is_plain
from engine.lora_copies import GpuRowCopy, HasPairs, RowCopies
from engine.lora_scale_shift import ScaleShift
from kernels import (
    HAS_TRITON,
    LoraMetadata,
    LoraSegment,
    compile_only,
    lora_add_group_,
    lora_product,
    product_and_delta,
)

SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linears that read the same input, in the order in which model classes call them."""

_MEMBER = "switchboard_lora"
_OWN_FORWARD = "switchboard_own_forward"


class LoraGroup:
    """Linears that read the same input, with their adapters: row n of the buffers is LoRA row n.

    Attributes:
        names: the M modules.
        slice_ends: M ends of the modules' columns in the group's output; the last is O.
        lora_a: [N, M, R, in]; lora_b: [N, O, R], scale folded in. What lies above a row's own rank is never used.
        host_ranks: [N][M] ranks, 0 where the row's adapter does not touch the module; `ranks` has them on the device.
        metadata: which packed tokens use which row; shared with all groups of the same part of the model.
        step_number: by which operators find `metadata`.
        has_plain_base: whether the base product is one of plain weights, which is computed here; else each module's own
            forward computes it, whatever its class does.
        scale_shift: what adapters do to the base product itself; None until one does anything.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        sites: Mapping[str, LinearSite],
        metadata: LoraMetadata,
        step_number: int,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        self.names = tuple(modules)
        self.metadata = metadata
        self.step_number = step_number
        self.slice_ends = tuple(_ends([sites[name].out_features for name in self.names]))
        device = device_of(next(iter(modules.values())))
        in_features = sites[self.names[0]].in_features
        shape_a = (num_slots, len(self.names), max_rank, in_features)
        self.lora_a = torch.zeros(shape_a, dtype=dtype, device=device)
        self.lora_b = torch.zeros(num_slots, self.slice_ends[-1], max_rank, dtype=dtype, device=device)
        self.host_ranks = [[0] * len(self.names) for _ in range(num_slots)]
        self.ranks = torch.zeros(num_slots, len(self.names), dtype=torch.int32, device=device)
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        self.scale_shift: ScaleShift | None = None
        self.has_plain_base = all(is_plain(module) for module in modules.values())
        if len(modules) > 1:
            self._fuse(cast("list[nn.Linear]", list(modules.values())))

    def forward(self, index: int, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Module `index`'s output [..., out] for x [..., in]; in a group the first module's call serves all."""
        if self._weight is None:
            if self.has_plain_base:
                linear = cast(nn.Linear, module)
                return self._linear(x, linear.weight, linear.bias)
            own_forward = getattr(module, _OWN_FORWARD, None)
            if own_forward is None:
                own_forward = super(LoraLinearMixin, module).forward  # type: ignore[misc]
            output: torch.Tensor = own_forward(x).contiguous()
            self._add(output, x)
            return output
        if index == 0 or self._last is None or self._last[0] is not x:
            self._last = (x, self._linear(x, self._weight, self._bias))
        output = self._last[1]
        if index == len(self.slice_ends) - 1:
            self._last = None
        start = self.slice_ends[index - 1] if index else 0
        return output[..., start : self.slice_ends[index]]

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that `forward` reads beside its input."""
        yield from (self.lora_a, self.lora_b, self.ranks, self.metadata.is_adapted)
        yield from (tensor for tensor in (self._weight, self._bias) if tensor is not None)
        if self.scale_shift is not None:
            yield from self.scale_shift.tensors

    @property
    def kernel_key(self) -> tuple[object, ...]:
        """Groups of one key launch the same variants of the kernels."""
        return type(self), self.lora_a.shape, self.lora_a.dtype, self.slice_ends, self.step_number, self._can_be_beside

    @property
    def _can_be_beside(self) -> bool:
        """Whether LoRA has a product to run beside: one that is computed here, and that nothing else changes."""
        return self.has_plain_base and self.scale_shift is None

    def weight_of(self, linear: nn.Linear) -> torch.Tensor:
        """What the base product reads: the group's one weight, else the linear's own."""
        return linear.weight if self._weight is None else self._weight

    def write(self, lora_slot: int, generation: HasPairs) -> None:
        """Copy a generation's weights into row `lora_slot`; modules that it does not touch get rank 0."""
        start = 0
        for index, (name, end) in enumerate(zip(self.names, self.slice_ends, strict=True)):
            pair = generation.pairs.get(name)
            rank = 0 if pair is None else pair.rank
            if pair is not None:
                self.lora_a[lora_slot, index, : pair.a.shape[0]] = pair.a
                self.lora_b[lora_slot, start:end, :rank] = pair.b
            self.host_ranks[lora_slot][index] = rank
            start = end
        self._send_ranks(lora_slot)

    def clear(self, lora_slot: int) -> None:
        """Make the ranks of row `lora_slot` 0."""
        if any(self.host_ranks[lora_slot]):
            self.host_ranks[lora_slot] = [0] * len(self.names)
            self._send_ranks(lora_slot)

    def call_kernels(self, max_recorded_tokens: int) -> None:
        """Call whatever steps of any size call, on memory that nobody reads: for `kernels.compile_only`.

        Args:
            max_recorded_tokens: of steps in which compiled layers are recorded; 0 where none are.
        """

        def call(num_tokens: int) -> None:
            metadata = self.metadata
            metadata.update((LoraSegment(0, 0, num_tokens),), num_tokens)
            x = self.lora_a.new_empty(num_tokens, self.lora_a.shape[-1])
            output = self.lora_a.new_empty(num_tokens, self.slice_ends[-1])
            compute = product_and_delta if metadata.is_delta_apart else lora_product
            weights = self.lora_a, self.lora_b, self.ranks, self.host_ranks, self.slice_ends
            compute(lambda: output, x, *weights, metadata)

        for num_tokens in self.metadata.step_sizes():
            call(num_tokens)
        if max_recorded_tokens and self._can_be_beside:
            with self.metadata.recording():
                for num_tokens in self.metadata.step_sizes(max_recorded_tokens):
                    call(num_tokens)
        self.metadata.update((), 0)

    def _send_ranks(self, lora_slot: int) -> None:
        self.ranks[lora_slot] = torch.tensor(self.host_ranks[lora_slot], dtype=torch.int32, device=self.ranks.device)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The linear layers' output [..., O] with LoRA added."""
        if torch.compiler.is_compiling() and self.scale_shift is None:
            inputs = x, weight, bias, self.lora_a, self.lora_b, self.ranks, self.slice_ends, self.step_number
            linear: torch.Tensor
            if not self.metadata.is_delta_apart:
                linear = ops.lora_linear_op(*inputs)
            else:  # The compiler makes this sum a part of the kernel that comes next.
                product, delta = ops.lora_linear_and_delta_op(*inputs)
                is_adapted = self.metadata.is_adapted[: product.numel() // product.shape[-1]] > 0
                sums = torch.where(is_adapted.view(*product.shape[:-1], 1), product + delta, product)
                linear = sums.to(product.dtype)
            return linear
        output = cpu_linear.linear(x, weight, bias)
        self._add(output, x)
        return output

    def _add(self, output: torch.Tensor, x: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            if self.scale_shift is not None:
                ops.scale_shift_op(output, *self.scale_shift.tensors, self.step_number)
            ops.lora_add_op(output, x, self.lora_a, self.lora_b, self.ranks, self.slice_ends, self.step_number)
        elif self.metadata.segments:
            rows = output.view(-1, output.shape[-1])
            if self.scale_shift is not None:
                self.scale_shift.apply_(rows, self.metadata)
            lora_add_group_(
                rows,
                x.reshape(-1, x.shape[-1]),
                self.lora_a,
                self.lora_b,
                self.ranks,
                self.host_ranks,
                self.slice_ends,
                self.metadata,
            )

    def _fuse(self, modules: list[nn.Linear]) -> None:
        """One weight for all modules; theirs become views of it, so that nothing is held twice."""
        self._weight = torch.cat([module.weight.data for module in modules])
        biases = [module.bias for module in modules if module.bias is not None]
        self._bias = torch.cat([bias.data for bias in biases]) if biases else None
        start = 0
        for module, end in zip(modules, self.slice_ends, strict=True):
            module.weight = nn.Parameter(self._weight[start:end], requires_grad=False)
            if self._bias is not None:
                module.bias = nn.Parameter(self._bias[start:end], requires_grad=False)
            start = end


class LoraMember(NamedTuple):
    """A linear's place: module number `position` of `group`."""

    group: LoraGroup
    position: int


class LoraLinearMixin:
    """`forward` of a LoRA-aware linear: the base layer's output plus each token's own adapter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        member: LoraMember = getattr(self, _MEMBER)
        return member.group.forward(member.position, cast(nn.Module, self), x)


def lora_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Buffers and fused weights that a LoRA-aware linear reads; nothing for other modules."""
    member: LoraMember | None = getattr(module, _MEMBER, None)
    if member is not None:
        yield from member.group.tensors()


def linear_weights(model: nn.Module) -> Iterator[tuple[nn.Linear, torch.Tensor]]:
    """The model's plain linears, LoRA-aware or not, each with the weight that its product reads: a group shares one."""
    for module in model.modules():
        member: LoraMember | None = getattr(module, _MEMBER, None)
        if is_plain(module) if member is None else member.group.has_plain_base:
            linear = cast(nn.Linear, module)
            yield linear, linear.weight if member is None else member.group.weight_of(linear)


def compile_kernels(model: nn.Module, compiled: nn.Module | None, max_recorded_tokens: int) -> None:
    """Compile the kernels that the LoRA-aware linears of `model` launch in steps of any size, several at once.

    Args:
        compiled: the part of the model whose layers are compiled and recorded; None where none are.
        max_recorded_tokens: of steps that are recorded.
    """
    inside = set() if compiled is None else set(compiled.modules())
    calls: dict[object, tuple[LoraGroup, int]] = {}
    for module in model.modules():
        member: LoraMember | None = getattr(module, _MEMBER, None)
        if member is not None and member.group.metadata.has_tiles:
            limit = max_recorded_tokens if module in inside else 0
            calls.setdefault((member.group.kernel_key, limit), (member.group, limit))

    def call_all() -> None:
        for group, limit in calls.values():
            group.call_kernels(limit)

    compile_only(call_all)


class LoraBuffers:
    """All groups of a model; implements `adapters.slots.SlotWriter`.

    Args:
        model: the model whose linears are changed in place.
        sites: linears that adapters may touch, by module name.
        metadata: the step metadata of each part (`decoder`, `tower`, `connector`, `head`).
        num_slots: N. max_rank: R. dtype: of the buffers.
        make_group: makes a group of linears, with `LoraGroup`'s arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Mapping[str, LinearSite],
        metadata: Mapping[str, LoraMetadata],
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        make_group: Callable[..., LoraGroup] | None = None,
    ) -> None:
        self._groups: list[LoraGroup] = []
        numbers = {part: ops.register_step(of_part) for part, of_part in metadata.items()}
        classes: dict[type, type] = {}
        for names in group_sites(model, sites):
            modules = {name: model.get_submodule(name) for name in names}
            part = sites[names[0]].part
            group = (make_group or LoraGroup)(
                modules, sites, metadata[part], numbers[part], num_slots=num_slots, max_rank=max_rank, dtype=dtype
            )
            for index, module in enumerate(modules.values()):
                # A group is no tensor, so nn.Module keeps it as a plain attribute, out of the state dict.
                setattr(module, _MEMBER, LoraMember(group, index))
                _make_aware(module, classes)
            self._groups.append(group)
        has_copies = bool(self._groups) and HAS_TRITON and self._groups[0].lora_a.is_cuda
        self._copies = RowCopies(self._groups) if has_copies else None

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        num_bytes = sum(group.lora_a.nbytes + group.lora_b.nbytes for group in self._groups)
        return num_bytes + (self._copies.num_bytes if self._copies else 0)

    @property
    def slab_bytes(self) -> int:
        """The largest slab that is copied to a device as it is; 0 where rows are written in place."""
        return self._copies.num_bytes if self._copies else 0

    @property
    def groups(self) -> Sequence[LoraGroup]:
        """The groups, in the model's order."""
        return self._groups

    def write(self, lora_slot: int, generation: HasPairs) -> GpuRowCopy | None:
        """Copy a generation's weights into row `lora_slot` of every group; on a GPU beside the running steps."""
        if self._copies is not None:
            return self._copies.start(lora_slot, generation)
        for group in self._groups:
            group.write(lora_slot, generation)
        return None

    def clear(self, lora_slot: int) -> None:
        """Make the ranks of row `lora_slot` 0 in every group."""
        if self._copies is not None:
            self._copies.clear(lora_slot)
            return
        for group in self._groups:
            group.clear(lora_slot)


def group_sites(model: nn.Module, sites: Mapping[str, LinearSite]) -> Iterator[tuple[str, ...]]:
    """Names of linears that are computed together: those of `SHARED_INPUTS` under one decoder parent, else one by one."""
    grouped: set[str] = set()
    for name, site in sites.items():
        parent, _, leaf = name.rpartition(".")
        for leaves in SHARED_INPUTS:
            names = tuple(f"{parent}.{other}" for other in leaves)
            if leaf == leaves[0] and site.part == "decoder" and _can_fuse(model, sites, names):
                grouped.update(names)
                yield names
    for name in sites:
        if name not in grouped:
            yield (name,)


def _can_fuse(model: nn.Module, sites: Mapping[str, LinearSite], names: tuple[str, ...]) -> bool:
    """Plain linears that adapters may touch, of equal input and type, all with a bias or all without."""
    if any(name not in sites for name in names):
        return False
    modules = [model.get_submodule(name) for name in names]
    if not all(is_plain(module) for module in modules):
        return False
    linears = cast("list[nn.Linear]", modules)
    kinds = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}
    return len(kinds) == 1


def _make_aware(module: nn.Module, classes: dict[type, type]) -> None:
    """Change a linear's class, or its forward alone where that is an attribute of its own or its class cannot be changed.

    `classes` has the LoRA-aware class of each class that was met before.
    """
    base = type(module)
    if "forward" not in vars(module):
        try:
            if base not in classes:
                classes[base] = type(f"Lora{base.__name__}", (LoraLinearMixin, base), {})
            module.__class__ = classes[base]
            return
        except TypeError:  # It has no subclasses, or they are laid out in memory in another way.
            pass
    setattr(module, _OWN_FORWARD, module.forward)
    module.forward = functools.partial(LoraLinearMixin.forward, module)  # type: ignore[arg-type]


def _ends(sizes: list[int]) -> Iterator[int]:
    end = 0
    for size in sizes:
        end += size
        yield end
