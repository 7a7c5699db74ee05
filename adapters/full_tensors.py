"""What an adapter's files hold beside LoRA: copies of base weights, trained biases, rows of embedding tables.

PEFT saves whole modules (`modules_to_save`), embeddings that were resized or targeted, biases, and the rows of trained
tokens. A copy that equals the base changes nothing and is compared when numbers are read (`check_copies`); what the
running model can serve becomes part of the plan; the rest is refused. Called by `plan` and `weights`.

V rows of an embedding table, H its width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from adapters.errors import AdapterRefused
from adapters.keys import TensorKey, clean_module
from adapters.landing import first_few, listed
from adapters.pairs import Misfit, check_numbers
from adapters.places import TensorPlace
from adapters.planned import PlannedBias, PlannedCopy, PlannedRows
from adapters.spec import AdapterSpec
from adapters.surface import EmbeddingSite, ModelSurface
from adapters.token_rows import RowSource, merge_rows

FULL_REMEDY = "merge the adapter into the model and serve that as the base, or train without it"
BIAS_REMEDY = "train with bias='none' and lora_bias=False"
TOKENS_REMEDY = "train without added or trained tokens, or merge the adapter into the model"
_COPY_LEVELS = re.compile(r"\.(?:token_adapter|modules_to_save(?:\.[^.]+(?=\.))?|base_layer|original_module)(?=\.)")
_CHUNK_BYTES = 64 << 20


@dataclass
class Extras:
    """What was found; `warnings` and `reasons` are sentences."""

    biases: dict[str, PlannedBias] = field(default_factory=dict)
    rows: dict[str, PlannedRows] = field(default_factory=dict)
    copies: list[PlannedCopy] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def plan_extras(
    keys: Sequence[TensorKey],
    tensors: Mapping[str, TensorPlace],
    added: Mapping[str, TensorPlace],
    spec: AdapterSpec,
    surface: ModelSurface,
) -> Extras:
    """Everything but LoRA pairs. `added` are the tensors of `new_embeddings.safetensors`."""
    return _ExtrasPlanner(spec, surface).plan(keys, tensors, added)


class _ExtrasPlanner:
    def __init__(self, spec: AdapterSpec, surface: ModelSurface) -> None:
        self._spec = spec
        self._surface = surface
        self._extras = Extras()
        names = surface.names
        self._tensor_names, self._tables, self._layers = names.tensors, names.tables, names.linears
        self._refused: dict[str, list[str]] = {}
        self._sources: dict[str, list[RowSource]] = {}

    def plan(
        self, keys: Sequence[TensorKey], tensors: Mapping[str, TensorPlace], added: Mapping[str, TensorPlace]
    ) -> Extras:
        for key in keys:
            try:
                self._add(key, tensors[key.raw])
            except Misfit as misfit:
                self._extras.reasons.append(str(misfit))
        try:
            self._add_new_embeddings(added)
        except Misfit as misfit:
            self._extras.reasons.append(str(misfit))
        self._extras.rows = {table: merge_rows(table, sources) for table, sources in self._sources.items()}
        self._share_with_tied_heads()
        self._check_config(keys)
        self._extras.reasons += [sentence.format(names=listed(names)) for sentence, names in self._refused.items()]
        return self._extras

    def _add(self, key: TensorKey, place: TensorPlace) -> None:
        if key.kind == "rows":
            self._add_trained_rows(key, place)
        elif key.kind == "bias":
            self._add_bias(key, place)
        elif key.kind == "full":
            self._add_full(key, place, f"{key.module}.weight")
        elif key.kind == "other":
            name = clean_module(_COPY_LEVELS.sub("", key.raw))
            if self._tensor_names.resolve(name).name is None:
                self._refuse("tensors of unknown meaning ({names}); only lora_A and lora_B weights are served", key.raw)
            else:
                self._add_full(key, place, name)

    def _add_bias(self, key: TensorKey, place: TensorPlace) -> None:
        check_numbers(place)
        layer = self._layers.resolve(key.module).name
        if self._surface.serves_bias and layer is not None:
            if place.shape != (self._surface.linears[layer].out_features,):
                raise Misfit(
                    f"tensor {key.raw} is {list(place.shape)}, but the model needs "
                    f"[{self._surface.linears[layer].out_features}] there"
                )
            self._extras.biases[layer] = PlannedBias(layer, key.module, place, 1.0, replaces=True)
            return
        remedy = self._bias_remedy()
        sentence = f"trained bias vectors are not served ({{names}}); {remedy}"
        self._add_copy(key, place, f"{key.module}.bias", sentence, remedy)

    def _add_full(self, key: TensorKey, place: TensorPlace, written: str) -> None:
        sentence = (
            f"full weight matrices (modules_to_save or saved embeddings) are not served ({{names}}); {FULL_REMEDY}"
        )
        self._add_copy(key, place, written, sentence, FULL_REMEDY)

    def _add_copy(self, key: TensorKey, place: TensorPlace, written: str, sentence: str, remedy: str) -> None:
        """A full tensor: a copy to be compared, with rows of its own past the base's where it is a larger table."""
        check_numbers(place)
        name = self._tensor_names.resolve(written).name
        base = None if name is None else self._surface.base_tensor(name)
        if name is None or base is None:
            self._refuse(sentence, key.raw)
            return
        shape, base_shape = place.shape, tuple(base.shape)
        if shape == base_shape:
            self._extras.copies.append(PlannedCopy(name, key.module, place, remedy))
            return
        table = self._tables.resolve(name.removesuffix(".weight")).name
        is_table = table is not None or name.removesuffix(".weight") in self._surface.unsupported
        if not is_table or len(shape) != 2 or shape[1] != base_shape[1]:
            raise Misfit(f"tensor {key.raw} is {list(shape)}, but the model's is {list(base_shape)}; {remedy}")
        num_common = min(shape[0], base_shape[0])
        self._extras.copies.append(PlannedCopy(name, key.module, place.cut(0, num_common), remedy))
        if shape[0] > base_shape[0]:
            ids = tuple(range(base_shape[0], shape[0]))
            self._add_rows(table or name.removesuffix(".weight"), key.module, ids, place.cut(num_common, shape[0]))
        else:
            self._extras.warnings.append(
                f"{key.module} has {shape[0]} rows in the files and {base_shape[0]} in the model; the model's further "
                "rows are kept"
            )

    def _add_trained_rows(self, key: TensorKey, place: TensorPlace) -> None:
        check_numbers(place)
        if not self._surface.serves_embeddings:
            sentence = f"trained token embeddings (trainable_token_indices) are not served ({{names}}); {TOKENS_REMEDY}"
            self._refuse(sentence, key.raw)
            return
        ids = next((ids for name, ids in self._spec.trainable_tokens.items() if _is_suffix(name, key.module)), None)
        if ids is None:
            raise Misfit(f"tensor {key.raw} has no entry of trainable_token_indices that says which tokens it is about")
        if len(place.shape) != 2 or place.shape[0] != len(ids):
            raise Misfit(
                f"tensor {key.raw} is {list(place.shape)}, but trainable_token_indices lists {len(ids)} tokens there"
            )
        table = self._tables.resolve(key.module).name
        if table is None:
            raise Misfit(f"tensor {key.raw}: the model has no embedding or head of that name")
        self._add_rows(table, key.module, ids, place)

    def _add_new_embeddings(self, added: Mapping[str, TensorPlace]) -> None:
        """Rows of `new_embeddings.safetensors`: `input_embeddings` and `output_embeddings`, appended to the tables."""
        if not added:
            return
        inputs, heads = (
            list(self._surface.embeddings.values()),
            [name for name, site in self._surface.linears.items() if site.part == "head"],
        )
        for name, place in added.items():
            check_numbers(place)
            if not self._surface.serves_embeddings or not inputs:
                raise Misfit(
                    "new_embeddings.safetensors: added token embeddings are not served; merge the adapter into the model"
                )
            table = {
                "input_embeddings": inputs[0].name,
                "output_embeddings": next(iter(heads), inputs[0].tied_head),
            }.get(name)
            if table is None or len(place.shape) != 2:
                raise Misfit(
                    f"new_embeddings.safetensors holds {name[:80]!r} {list(place.shape)}, but only input_embeddings and "
                    "output_embeddings [tokens, width] are known"
                )
            start = inputs[0].num_tokens
            self._add_rows(table, name, tuple(range(start, start + place.shape[0])), place)

    def _add_rows(self, table: str, file_name: str, ids: tuple[int, ...], place: TensorPlace) -> None:
        site = self._site_of(table)
        num_tokens = site.num_tokens if site else 0
        num_added = max(0, max(ids) + 1 - num_tokens)
        if not self._surface.serves_embeddings or site is None:
            self._refuse(f"trained or added token embeddings are not served ({{names}}); {TOKENS_REMEDY}", file_name)
        elif place.shape[1] != site.width:
            raise Misfit(f"{file_name}: its rows are {place.shape[1]} wide, but the model needs {site.width}")
        elif num_added > self._surface.extra_vocab_size:
            raise Misfit(
                f"the adapter adds {num_added} tokens to the {num_tokens} of the model ({file_name}), but this server has "
                f"room for {self._surface.extra_vocab_size}; start it with --lora-extra-vocab-size {num_added}"
            )
        elif len(set(ids)) < len(ids) or min(ids) < 0:
            raise Misfit(f"{file_name}: its token ids repeat or are negative; list each token once")
        else:
            self._sources.setdefault(table, []).append(RowSource(file_name, place.name, ids, place))

    def _site_of(self, table: str) -> EmbeddingSite | None:
        """The embedding whose tokens a table's rows are about: itself, or a head's own."""
        sites = self._surface.embeddings
        if table in sites:
            return sites[table]
        tied = next((site for site in sites.values() if site.tied_head == table), None)
        return tied or next(iter(sites.values()), None)

    def _share_with_tied_heads(self) -> None:
        """A head that shares the table shares its rows; PEFT ties trained tokens likewise."""
        for site in self._surface.embeddings.values():
            rows = self._extras.rows.get(site.name)
            if rows is not None and site.tied_head is not None and site.tied_head not in self._extras.rows:
                self._extras.rows[site.tied_head] = PlannedRows(
                    site.tied_head, rows.file_name, rows.token_ids, rows.rows
                )

    def _check_config(self, keys: Iterable[TensorKey]) -> None:
        """What the config says was trained must lie in the files."""
        keys = list(keys)
        full = [_COPY_LEVELS.sub("", key.raw) for key in keys if key.kind in ("full", "bias", "other")]
        missing = [name for name in self._spec.modules_to_save if not any(f".{name}." in f".{raw}" for raw in full)]
        if missing:
            self._extras.reasons.append(
                f"modules_to_save names {listed(missing)}, but the files hold no weights of it; the checkpoint is "
                "incomplete, save it again"
            )
        if self._spec.trainable_tokens and not any(key.kind == "rows" for key in keys):
            self._extras.reasons.append(
                "trainable_token_indices names tokens, but the files hold no rows for them; the checkpoint is incomplete, "
                "save it again"
            )
        lost = [
            layer
            for layer in self._touched(keys)
            if self._spec.bias != "none" and f"{layer}.bias" in self._surface.base_tensor_names
        ]
        if lost and not any(key.kind == "bias" for key in keys):
            self._extras.reasons.append(
                f"bias is {self._spec.bias!r}, but the files hold no biases, though {listed(lost)} have one; some "
                "versions of PEFT lose them: train with bias='none', or save the adapter again with a current one"
            )
        has_lora_bias = any(key.kind == "lora_bias" for key in keys)
        if has_lora_bias and not self._surface.serves_bias:
            self._refuse(
                f"trained bias vectors are not served ({{names}}); {self._bias_remedy()}",
                next(key.raw for key in keys if key.kind == "lora_bias"),
            )
        elif has_lora_bias != self._spec.lora_bias:
            state = "holds" if has_lora_bias else "holds no"
            self._extras.reasons.append(
                f"lora_bias is {str(self._spec.lora_bias).lower()}, but the adapter's file {state} biases of lora_B; "
                "correct adapter_config.json, or save the adapter again"
            )

    def _touched(self, keys: Iterable[TensorKey]) -> list[str]:
        """Layers with LoRA, by name."""
        found = {self._layers.resolve(module).name for module in {key.module for key in keys if key.kind == "A"}}
        return sorted(name for name in found if name is not None)

    def _bias_remedy(self) -> str:
        flag = self._surface.scale_shift_flag
        return f"start the server with {flag}, or {BIAS_REMEDY}" if flag else BIAS_REMEDY

    def _refuse(self, sentence: str, name: str) -> None:
        self._refused.setdefault(sentence, []).append(name)


def check_copies(copies: Iterable[PlannedCopy], surface: ModelSurface) -> None:
    """Compare copies with the base's tensors; raises `AdapterRefused` where they are not equal.

    Equal is what is so in the type of the base or in the type of the file: a base that is served in another precision
    than it was trained with rounds both alike. A base on the meta device has shapes alone and is not compared.
    """
    reasons = []
    for copy in copies:
        base = surface.base_tensor(copy.tensor_name)
        if base is not None and base.is_meta:
            continue
        num_rows = copy.copy.shape[0] if copy.copy.shape else 1
        num_different = num_rows if base is None else _num_different_rows(copy.copy, base)
        if num_different:
            is_bias = copy.tensor_name.endswith(".bias")
            what = "trained bias vectors" if is_bias else "full weight matrices (modules_to_save or saved embeddings)"
            reasons.append(
                f"{what} are not served: those of {copy.file_name} differ from the base model's in {num_different} of "
                f"{num_rows} rows; {copy.remedy}"
            )
    if reasons:
        raise AdapterRefused(first_few(reasons))


def _num_different_rows(place: TensorPlace, base: torch.Tensor) -> int:
    if not place.shape:
        return int(not place.read().to(base.dtype).equal(base.detach().cpu()))
    num_rows = place.shape[0]
    row_bytes = max(1, base[0].numel() * 8)
    step = max(1, _CHUNK_BYTES // row_bytes)
    num_different = 0
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        mine = place.cut(start, end).read().reshape(end - start, -1)
        theirs = base[start:end].detach().cpu().reshape(end - start, -1)
        same = mine.to(theirs.dtype).eq(theirs).all(dim=1) | theirs.to(mine.dtype).eq(mine).all(dim=1)
        num_different += int((~same).sum())
    return num_different


def _is_suffix(name: str, module: str) -> bool:
    return not name or module == name or module.endswith("." + name)
