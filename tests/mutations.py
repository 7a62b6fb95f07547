"""Changes of checkpoint files, and what every reader must say of each; both halves of the package run this table.

Needs no toolkit: the tests of the compressing half drive ``load`` and ``moe-coverage inspect`` through it, those of
the serving half vLLM, which is in another environment.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_coverage_plugin.manifest import CONFIG_KEY, INDEX_NAME, checksum

WEIGHTS = "model.safetensors"
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1}

PLAIN = ("ragged", "padded", "shared")
PACKED = ("ragged_w4a16", "padded_w4a16", "asymmetric", "shared_w4a16")
FLOAT8 = ("ragged_fp8", "padded_fp8")
SCALED = PACKED + FLOAT8
ALL = PLAIN + SCALED
RAGGED = ("ragged", "shared", "ragged_w4a16", "asymmetric", "shared_w4a16", "ragged_fp8")
SHARED = ("shared", "shared_w4a16")
# for changes of config.json, which is read in one way for all
SOME = ("shared", "padded_w4a16", "ragged_fp8")
SOME_SCALED = ("padded_w4a16", "ragged_fp8")
SOME_PACKED = ("shared_w4a16", "padded_w4a16")
"""Checkpoints that the table changes: layout and scheme of Qwen3-MoE, and of Qwen2-MoE, which has shared experts."""


@dataclass
class Tensor:
    """A tensor of a file, as its bytes."""

    dtype: str
    shape: list[int]
    data: bytes

    def cut(self, axis: int, length: int) -> Tensor:
        """The first part of one axis, or the tensor repeated if it is shorter."""
        shape = [*self.shape[:axis], length, *self.shape[axis + 1 :]]
        return Tensor(self.dtype, shape, _resized(self.data, math.prod(shape) * ITEM_BYTES[self.dtype]))

    def cast(self, dtype: str) -> Tensor:
        """Other bytes in a dtype, all of them positive numbers if it is a float."""
        size = ITEM_BYTES[dtype]
        one = {"F32": b"\0\0\x80\x3f", "BF16": b"\x80\x3f", "F16": b"\0\x3c"}.get(dtype, b"\1" + bytes(size - 1))
        return Tensor(dtype, self.shape, one * math.prod(self.shape))

    def with_value(self, value: float, place: int = -1) -> Tensor:
        """The tensor with one element changed."""
        encoded = {
            "F32": struct.pack("<f", value),
            "BF16": struct.pack("<f", value)[2:],
            "F16": struct.pack("<e", value),
        }[self.dtype]
        at = place % math.prod(self.shape) * len(encoded)
        return Tensor(self.dtype, self.shape, self.data[:at] + encoded + self.data[at + len(encoded) :])


class Files:
    """A checkpoint of one weight file that can be changed; :meth:`save` writes it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.tensors = read_file(directory / WEIGHTS)
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())

    def save(self) -> None:
        write_file(self.directory / WEIGHTS, self.tensors)
        self.write_config()

    def write_config(self) -> None:
        (self.directory / "config.json").write_text(json.dumps(self.config))

    def names(self, pattern: str) -> list[str]:
        """Names that a regular expression matches entirely, of which there is at least one."""
        found = sorted(name for name in self.tensors if re.fullmatch(pattern, name))
        assert found, f"no tensor is named {pattern}"
        return found

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    @property
    def weights(self) -> dict[str, Any]:
        """Arguments of the quantized weights."""
        return self.quantization["config_groups"]["group_0"]["weights"]

    @property
    def entry(self) -> dict[str, Any]:
        return (self.config.get("quantization_config") or self.config)[CONFIG_KEY]

    def seal(self) -> None:
        """Make the checksum of a changed entry correct."""
        self.entry["sha256"] = checksum(self.entry)

    def split(self) -> tuple[dict[str, str], dict[str, dict[str, Tensor]]]:
        """Write two files instead of one; returns the index and the tensors of both files."""
        names = sorted(self.tensors)
        (self.directory / WEIGHTS).unlink()
        files = {f"model-0000{half + 1}-of-00002.safetensors": names[half::2] for half in range(2)}
        contents = {file: {name: self.tensors[name] for name in of} for file, of in files.items()}
        weight_map = {name: file for file, of in files.items() for name in of}
        self.write_split(weight_map, contents)
        return weight_map, contents

    def write_split(self, weight_map: dict[str, str], contents: dict[str, dict[str, Tensor]]) -> None:
        for file, of in contents.items():
            write_file(self.directory / file, of)
        (self.directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_file(file: Path) -> dict[str, Tensor]:
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: Tensor(of["dtype"], of["shape"], content[start + of["data_offsets"][0] : start + of["data_offsets"][1]])
        for name, of in header.items()
    }


def write_file(file: Path, tensors: dict[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    # large elements first, as the library does, so that all are aligned
    ordered = sorted(tensors.items(), key=lambda item: (-ITEM_BYTES[item[1].dtype], item[0]))
    for name, tensor in ordered:
        assert len(tensor.data) == math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype], name
        offsets = [place, place := place + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # one call, so that a reader that has mapped the file keeps the old one
    file.unlink(missing_ok=True)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensor.data for _, tensor in ordered))


def _resized(data: bytes, length: int) -> bytes:
    return (data * (length // max(len(data), 1) + 1))[:length]


Edit = Callable[[Files], object]


@dataclass(frozen=True)
class Mutation:
    """A change of a checkpoint, and the verdict of all readers.

    Attributes:
        name: of the change.
        bases: checkpoints that it changes.
        edit: makes the change; what it leaves in the object is saved, unless ``saved`` is false.
        message: that every reader stops with; ``None`` if every reader opens the checkpoint.
        saved: write weights and config after the edit.
        toolkits: vLLM reads ``config.json`` with transformers before it asks the plugin, and may stop by itself, with
            a message of its own.
        recorded: the record of contents is needed to find it.
    """

    name: str
    bases: tuple[str, ...]
    edit: Edit = field(compare=False)
    message: str | None
    saved: bool = True
    toolkits: bool = False
    recorded: bool = False


def cases(recorded: bool = True) -> Iterator[tuple[Mutation, str]]:
    """Yield every change with a checkpoint of each kind of scheme that it is for; their layouts take turns.

    Without records, yield the changes that are found without them, each with one checkpoint.
    """
    for number, mutation in enumerate(MUTATIONS):
        if recorded:
            kinds = [[base for base in kind if base in mutation.bases] for kind in (PLAIN, PACKED, FLOAT8)]
            yield from ((mutation, fitting[number % len(fitting)]) for fitting in kinds if fitting)
        elif not mutation.recorded:
            yield mutation, mutation.bases[number % len(mutation.bases)]


def mutated(mutation: Mutation, base: Path, copy: Path, recorded: bool = True) -> Path:
    """Copy a checkpoint and change it, the record of its contents removed first if ``recorded`` is false."""
    copy.mkdir()
    for file in ("config.json", "generation_config.json", WEIGHTS):
        if (base / file).is_file():
            shutil.copyfile(base / file, copy / file)
    files = Files(copy)
    if not recorded:
        del files.entry["contents"]
        files.seal()
        files.write_config()
    mutation.edit(files)
    if mutation.saved:
        files.save()
    return copy


# --- changes of tensors

EXPERT = r".*\.experts\.\d+\.down_proj\.weight(_packed)?"
EXPERT_SCALE = r".*\.experts\.\d+\.up_proj\.weight_scale"
Q = r"model\.layers\.1\.self_attn\.q_proj"
ROUTER = r"model\.layers\.1\.mlp\.gate\.weight"
NORM = r"model\.layers\.1\.input_layernorm\.weight"


def remove(pattern: str, every: bool = False) -> Edit:
    def edit(files: Files) -> None:
        names = files.names(pattern)
        for name in names if every else names[:1]:
            del files.tensors[name]

    return edit


def change(pattern: str, to: Callable[[Tensor], Tensor], every: bool = False) -> Edit:
    def edit(files: Files) -> None:
        names = files.names(pattern)
        for name in names if every else names[:1]:
            files.tensors[name] = to(files.tensors[name])

    return edit


def cast(pattern: str, dtype: str, every: bool = False) -> Edit:
    return change(pattern, lambda tensor: tensor.cast(dtype), every)


def put(pattern: str, value: float) -> Edit:
    return change(pattern, lambda tensor: tensor.with_value(value))


def add(name: str, like: str, dtype: str | None = None) -> Edit:
    """Add a tensor with the bytes of another one."""

    def edit(files: Files) -> None:
        tensor = files.tensors[files.names(like)[0]]
        files.tensors[name] = tensor if dtype is None else tensor.cast(dtype)

    return edit


def negative_as_written(files: Files) -> None:
    """What AutoRound makes, whose scales have a sign."""
    put(EXPERT_SCALE, -1.0)(files)
    files.entry["contents"] = files.entry.get("contents", {}) | {"negative_scales": True}
    files.seal()


def add_mtp(layers: int) -> Edit:
    """Add a layer that predicts several tokens, which a config counts or not."""

    def edit(files: Files) -> None:
        files.config["mtp_num_hidden_layers"] = layers
        add("mtp.layers.0.mlp.experts.0.up_proj.weight", like=NORM)(files)

    return edit


def rename(pattern: str, old: str, new: str) -> Edit:
    def edit(files: Files) -> None:
        for name in files.names(pattern):
            files.tensors[name.replace(old, new)] = files.tensors.pop(name)

    return edit


def move_an_expert(to: int | None) -> Edit:
    """Give a kept expert of layer 1 another number, or remove it."""

    def edit(files: Files) -> None:
        first = files.names(r"model\.layers\.1\.mlp\.experts\.\d+\..*")[0]
        expert = first.split(".experts.")[1].split(".")[0]
        for name in files.names(rf"model\.layers\.1\.mlp\.experts\.{expert}\..*"):
            tensor = files.tensors.pop(name)
            if to is not None:
                files.tensors[name.replace(f".experts.{expert}.", f".experts.{to}.")] = tensor

    return edit


def give_a_removed_expert(files: Files) -> None:
    layer, experts = next(iter(files.entry["removed_experts"].items()))
    parts = [name for name in files.tensors if re.match(rf"{re.escape(layer)}\.\d+\.", name)]
    kept = re.match(rf"{re.escape(layer)}\.(\d+)\.", parts[0])
    assert kept is not None
    for name in [name for name in parts if name.startswith(kept[0])]:
        files.tensors[name.replace(kept[0], f"{layer}.{experts[0]}.")] = files.tensors[name]


def resize(pattern: str, axis: int, by: int) -> Edit:
    return change(pattern, lambda tensor: tensor.cut(axis, tensor.shape[axis] + by))


def swap_axes(tensor: Tensor) -> Tensor:
    return Tensor(tensor.dtype, tensor.shape[::-1], tensor.data)


def flat(tensor: Tensor) -> Tensor:
    return Tensor(tensor.dtype, [math.prod(tensor.shape)], tensor.data)


def wrong_shape_value(tensor: Tensor) -> Tensor:
    return Tensor(tensor.dtype, tensor.shape, (40).to_bytes(8, "little") + tensor.data[8:])


def all_floats_in(dtype: str) -> Edit:
    """Cast a 16- or 32-bit checkpoint, as users do."""

    def edit(files: Files) -> None:
        for name, tensor in files.tensors.items():
            if tensor.dtype in ("F32", "BF16", "F16"):
                files.tensors[name] = tensor.cast(dtype)

    return edit


# --- changes of files


def second_copy_in_another_shard(files: Files) -> None:
    weight_map, contents = files.split()
    first, second = contents
    name = next(iter(contents[first]))
    files.write_split(weight_map, contents | {second: contents[second] | {name: contents[first][name]}})


def stray_file(name: str, indexed: bool, content: dict[str, Tensor] | None = None) -> Edit:
    def edit(files: Files) -> None:
        if indexed:
            files.split()
        tensors = files.tensors if content is None else content
        write_file(files.directory / name, dict(list(tensors.items())[:1]))

    return edit


def change_index(to: Callable[[dict[str, str]], dict[str, str]]) -> Edit:
    def edit(files: Files) -> None:
        weight_map, contents = files.split()
        files.write_split(to(weight_map), contents)

    return edit


def other_file(weight_map: dict[str, str]) -> dict[str, str]:
    name, file = next(iter(weight_map.items()))
    return weight_map | {name: next(other for other in weight_map.values() if other != file)}


def rewrite(to: Callable[[bytes], bytes], file: str = WEIGHTS) -> Edit:
    def edit(files: Files) -> None:
        (files.directory / file).write_bytes(to((files.directory / file).read_bytes()))

    return edit


# --- changes of config.json


def configure(**values: Any) -> Edit:
    return lambda files: files.config.update(values)


def quantize(**values: Any) -> Edit:
    """Change the arguments of the quantized weights."""
    return lambda files: files.weights.update(values)


def set_groups(groups: Any) -> Edit:
    return lambda files: files.quantization.update(config_groups=groups)


def ignore_more(*names: str) -> Edit:
    return lambda files: files.quantization["ignore"].extend(names)


def change_entry(to: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(files: Files) -> None:
        to(files.entry)
        files.seal()

    return edit


def narrower(entry: dict[str, Any]) -> None:
    layer, widths = next(iter(entry["widths"].items()))
    entry["widths"][layer] = [max(width - entry["block_size"], 0) for width in widths]
    entry["layout"] = "ragged"


def many_layers(entry: dict[str, Any]) -> None:
    widths = next(iter(entry["widths"].values()))
    entry["widths"] = {f"model.layers.{layer}.mlp.experts": widths for layer in range(60_000)}


def repeat_a_key(content: bytes) -> bytes:
    return content.replace(b"{", b'{"model_type": "qwen3_moe", ', 1)


GIVEN = r"expected|has type|is not"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation("nothing", ALL, lambda _: None, None),
    # missing tensors
    Mutation("no_down_proj", ALL, remove(EXPERT), r"lacks|incomplete|has width|no weight"),
    Mutation("no_expert", ALL, move_an_expert(None), "and so 3 weights"),
    Mutation("no_expert_scale", SCALED, remove(EXPERT_SCALE), r"lacks .*up_proj\.weight_scale"),
    Mutation("no_expert_shape", PACKED, remove(r".*\.experts\.\d+\.up_proj\.weight_shape"), r"lacks .*weight_shape"),
    Mutation("no_zero_point", ("asymmetric",), remove(r".*\.experts\..*weight_zero_point"), "lacks .*zero_point"),
    Mutation("no_zero_points", ("asymmetric",), remove(r".*weight_zero_point", every=True), "lacks .*zero_point"),
    Mutation("no_query", ALL, remove(rf"{Q}\..*", every=True), r"lacks .*q_proj"),
    Mutation("no_query_scale", SCALED, remove(rf"{Q}\.weight_scale"), r"lacks .*q_proj\.weight_scale"),
    Mutation("no_output", ALL, remove(r"model\.layers\.1\.self_attn\.o_proj\..*", True), "lacks", recorded=True),
    Mutation("no_router", ALL, remove(ROUTER), "lacks"),
    Mutation("no_routers", ("ragged", "padded_w4a16"), remove(r".*mlp\.gate\.weight", True), "lacks", recorded=True),
    Mutation("no_norm", ALL, remove(NORM), "lacks", recorded=True),
    Mutation("no_last_norm", ("ragged", "padded_fp8"), remove(r"model\.norm\.weight"), "lacks", recorded=True),
    Mutation("no_head_norm", ("ragged_w4a16", "padded"), remove(r".*q_norm\.weight"), "lacks", recorded=True),
    Mutation("no_embeddings", ("ragged", "shared_w4a16"), remove(r".*embed_tokens\.weight"), "lacks", recorded=True),
    Mutation("no_head", ("padded", "ragged_fp8"), remove(r"lm_head\.weight"), "lacks", recorded=True),
    Mutation(
        "no_gate_of_shared", SHARED, remove(r".*1\.mlp\.shared_expert\.gate_proj\..*", True), "lacks .*gate_proj"
    ),
    Mutation("no_shared_gate", SHARED, remove(r".*shared_expert_gate\.weight"), "lacks", recorded=True),
    Mutation("no_bias", SHARED, remove(r".*q_proj\.bias"), "lacks", recorded=True),
    Mutation("no_last_layer", ALL, remove(r"model\.layers\.1\..*", True), "lacks|and so 3 weights"),
    # tensors that nothing describes
    Mutation("removed_expert", ("ragged", "ragged_w4a16"), give_a_removed_expert, "has width 0 and so 0 weights"),
    Mutation("ninth_expert", ("ragged", "padded"), move_an_expert(8), "holds expert 8|holds 0"),
    Mutation(
        "renamed_projection", ("ragged",), rename(r".*experts.*down_proj.*", "down_proj", "w9"), "shape|has width"
    ),
    Mutation(
        "renamed_layer", ALL, rename(r"model\.layers\.1\..*", "layers.1.", "layers.2."), "and so 3|not name|lacks"
    ),
    Mutation("unknown", ALL, add("model.layers.0.extra.weight", like=NORM), "was not written", recorded=True),
    Mutation("frequencies", PLAIN, add("model.rotary_emb.inv_freq", like=NORM), "was not written", recorded=True),
    Mutation(
        "adapter", ("ragged",), add("model.layers.0.self_attn.q_proj.lora_A.weight", NORM), "was not", recorded=True
    ),
    Mutation(
        "scale_of_nothing", ("ragged", "padded"), add("model.x.weight_scale", like=NORM), "no weight of that name"
    ),
    Mutation("scale_of_plain", PLAIN, add("lm_head.weight_scale", like=NORM), "does not belong to lm_head"),
    Mutation(
        "weight_beside_packed",
        PACKED,
        add("model.layers.1.self_attn.q_proj.weight", "lm_head.weight"),
        "does not belong",
    ),
    Mutation(
        "zero_point_of_symmetric",
        ("ragged_w4a16", "padded_w4a16"),
        add("model.layers.1.self_attn.q_proj.weight_zero_point", r".*q_proj\.weight_packed"),
        "has zero points, but",
    ),
    Mutation(
        "order",
        ("ragged_w4a16",),
        add("model.layers.1.self_attn.q_proj.weight_g_idx", NORM, "I32"),
        "was not",
        recorded=True,
    ),
    # dtypes
    Mutation("packed_float", PACKED, cast(r".*experts.*weight_packed", "F32"), "dtype F32, expected I32"),
    Mutation("packed_long", PACKED, cast(r".*experts.*weight_packed", "I64"), "dtype I64, expected I32"),
    Mutation("packed_short", PACKED, cast(rf"{Q}\.weight_packed", "I16"), "dtype I16, expected I32"),
    *(
        Mutation(f"scale_{dtype}", SCALED, cast(EXPERT_SCALE, dtype), f"dtype {dtype}, expected F32")
        for dtype in ("I32", "F8_E4M3", "I16", "BOOL", "F64", "U8")
    ),
    Mutation("query_scale_int", SCALED, cast(rf"{Q}\.weight_scale", "I32"), "dtype I32, expected F32"),
    Mutation("shape_float", PACKED, cast(r".*experts.*weight_shape", "F32"), "dtype F32, expected I64"),
    Mutation(
        "zero_point_bytes", ("asymmetric",), cast(r".*experts.*weight_zero_point", "I8"), "dtype I8, expected I32"
    ),
    Mutation("plain_int", PLAIN, cast(EXPERT, "I32"), "dtype I32, expected F32"),
    Mutation("plain_float8", PLAIN, cast(EXPERT, "F8_E4M3"), "lacks .*weight_scale|stored in another way"),
    Mutation("plain_bytes", PLAIN, cast(rf"{Q}\.weight", "U8"), "dtype U8, expected F32"),
    Mutation("plain_double", PLAIN, cast(EXPERT, "F64"), "dtype F64, expected F32"),
    Mutation("float8_plain", FLOAT8, cast(EXPERT, "F32"), "does not belong to"),
    Mutation("float8_other", FLOAT8, cast(EXPERT, "F8_E5M2"), "F8_E5M2|another way"),
    Mutation("float8_int8", FLOAT8, cast(EXPERT, "I8"), "I8"),
    Mutation("router_int", ALL, cast(ROUTER, "I32"), "dtype I32, expected F32"),
    Mutation("norm_bool", ALL, cast(NORM, "BOOL"), "dtype BOOL, expected F32"),
    Mutation("cast_to_float16", ALL, all_floats_in("F16"), None),
    Mutation("cast_to_bfloat16", ALL, all_floats_in("BF16"), None),
    Mutation("scales_in_float16", SCALED, cast(r".*weight_scale", "F16", every=True), None),
    # shapes
    Mutation("narrower_down", ALL, resize(EXPERT, 1, -4), "has shape"),
    Mutation("wider_up", ALL, resize(r".*experts\.\d+\.up_proj\.weight(_packed)?", 0, 32), "has shape"),
    Mutation("other_hidden", ALL, resize(r".*experts\.\d+\.down_proj\.weight(_packed)?", 0, 8), "has shape|features"),
    Mutation("fewer_groups", SCALED, resize(r".*down_proj\.weight_scale", 1, -1), "weight_scale has shape"),
    Mutation("more_groups", SCALED, resize(EXPERT_SCALE, 1, 1), "weight_scale has shape"),
    Mutation("transposed_scale", SCALED, change(EXPERT_SCALE, swap_axes), "weight_scale has shape"),
    Mutation("flat_packed", PACKED, change(r".*experts.*weight_packed", flat), "has shape"),
    Mutation("flat_weight", PLAIN + FLOAT8, change(EXPERT, flat), "has shape"),
    Mutation("wrong_shape_value", PACKED, change(r".*experts.*weight_shape", wrong_shape_value), "has shape"),
    Mutation("short_zero_points", ("asymmetric",), resize(r".*experts.*weight_zero_point", 0, -1), "has shape"),
    Mutation("fewer_queries", PLAIN + FLOAT8, resize(rf"{Q}\.weight", 0, -8), "has shape", recorded=True),
    Mutation("fewer_tokens", ALL, resize(r".*embed_tokens\.weight", 0, -1), r"has shape \[511"),
    Mutation("fewer_outputs", ALL, resize(r"lm_head\.weight", 0, -1), r"has shape \[511"),
    Mutation("longer_norm", ALL, resize(NORM, 0, 8), r"has shape \[136\]"),
    Mutation("fewer_routes", ALL, resize(ROUTER, 0, -1), r"has shape \[7, 128\]"),
    # values
    *(
        Mutation(f"{name}_{place}", SCALED, put(pattern, value), rf"weight_scale holds {words} as a scale")
        for name, value, words in (
            ("nan", math.nan, "NaN"),
            ("inf", math.inf, "infinity"),
            ("negative", -1.0, "a negative number"),
            ("zero", 0.0, "zero"),
        )
        for place, pattern in (("expert_scale", EXPERT_SCALE), ("query_scale", rf"{Q}\.weight_scale"))
    ),
    Mutation("negative_as_written", SOME_SCALED, negative_as_written, None, recorded=True),
    Mutation("nan_norm", ALL, put(NORM, math.nan), "input_layernorm.weight holds NaN"),
    Mutation("inf_norm", ALL, put(NORM, -math.inf), "input_layernorm.weight holds infinity"),
    Mutation("nan_router", ALL, put(ROUTER, math.nan), "gate.weight holds NaN"),
    Mutation("nan_last_norm", ("ragged", "padded_w4a16"), put(r"model\.norm\.weight", math.nan), "holds NaN"),
    Mutation("nan_bias", SHARED, put(r".*q_proj\.bias", math.nan), "q_proj.bias holds NaN"),
    Mutation("negative_norm", ALL, put(NORM, -1.0), None),
    # files
    Mutation("two_shards", ALL, lambda files: files.split(), None, saved=False),
    Mutation("twice_in_shards", ALL, second_copy_in_another_shard, "a second time", saved=False),
    Mutation("stray_copy", ALL, stray_file("model2.safetensors", indexed=False), "a second time", saved=False),
    Mutation("stray_shard", ALL, stray_file("model-3.safetensors", indexed=True), "does not list", saved=False),
    Mutation(
        "stray_other",
        ("ragged", "padded"),
        stray_file("adapter_model.safetensors", False, {"a.lora_A.weight": Tensor("F32", [1], bytes(4))}),
        "was not written",
        saved=False,
        recorded=True,
    ),
    Mutation("old_single_file", PLAIN, stray_file(WEIGHTS, indexed=True), "does not list", saved=False),
    Mutation(
        "index_of_more", PLAIN, change_index(lambda of: of | {"a.b": next(iter(of.values()))}), "not hold", saved=False
    ),
    Mutation(
        "index_of_less", PLAIN, change_index(lambda of: dict(list(of.items())[1:])), "does not list it", saved=False
    ),
    Mutation("index_of_other", PLAIN, change_index(other_file), "lists|says|not hold", saved=False),
    Mutation("truncated", ALL, rewrite(lambda content: content[: len(content) // 2]), "cannot be read", saved=False),
    Mutation("empty", ALL, rewrite(lambda _: b""), "cannot be read", saved=False),
    Mutation("longer", ("ragged", "padded"), rewrite(lambda content: content + b"\0"), "cannot be read", saved=False),
    Mutation(
        "no_weights",
        ALL,
        lambda files: (files.directory / WEIGHTS).rename(files.directory / "w.bin"),
        "no weights",
        False,
    ),
    Mutation("hidden_file", ALL, stray_file("._model.safetensors", indexed=False), None, saved=False),
    Mutation("mtp", ("ragged", "padded_w4a16"), add_mtp(layers=1), None),
    Mutation("mtp_of_none", ("ragged", "padded_w4a16"), add_mtp(layers=0), "was not written|an expert of no layer"),
    # config.json
    *(
        Mutation(
            f"group_size_{value!r}"[:24],
            SOME_PACKED,
            quantize(group_size=value),
            "group_size in weights",
            toolkits=True,
        )
        for value in ("128", 128.0, True, 0, 10**30, [128], None)
    ),
    Mutation("other_groups", SOME_PACKED, quantize(group_size=8), "has shape|were changed", recorded=True),
    *(
        Mutation(f"bits_{value!r}"[:24], SOME_SCALED, quantize(num_bits=value), "num_bits in weights", toolkits=True)
        for value in ("4", 4.0, True, 0, 10**30, None)
    ),
    Mutation(
        "eight_bits",
        SOME_PACKED,
        quantize(num_bits=8),
        "integers of 8 bits|config_groups|but engines serve",
        toolkits=True,
    ),
    Mutation("asymmetric", ("ragged_w4a16",), quantize(symmetric=False), "lacks .*zero_point"),
    Mutation("symmetric", ("asymmetric",), quantize(symmetric=True), "has zero points, but"),
    Mutation("by_channel", SOME_PACKED, quantize(strategy="channel", group_size=None), "weight_scale has shape"),
    Mutation("floats", SOME_PACKED, quantize(type="float"), "describes none|but engines serve", toolkits=True),
    Mutation(
        "weights_list",
        SOME_SCALED,
        set_groups({"group_0": {"targets": ["Linear"], "weights": [4]}}),
        "an object",
        toolkits=True,
    ),
    Mutation("groups_list", SOME_SCALED, set_groups([1]), "an object", toolkits=True),
    Mutation("group_number", SOME_SCALED, set_groups({"group_0": 3}), "an object", toolkits=True),
    Mutation("no_groups", SOME_SCALED, set_groups({}), "describes", toolkits=True),
    Mutation(
        "targets_number",
        SOME_SCALED,
        lambda f: f.quantization["config_groups"]["group_0"].update(targets=3),
        "a list",
        toolkits=True,
    ),
    Mutation(
        "ignore_text", SOME_SCALED, lambda files: files.quantization.update(ignore="lm_head"), "a list", toolkits=True
    ),
    Mutation(
        "ignores_query",
        SOME_SCALED,
        ignore_more("model.layers.1.self_attn.q_proj"),
        "but ignore in config.json names it",
    ),
    Mutation(
        "ignores_experts",
        SOME_SCALED,
        ignore_more(r"re:.*experts\..*up_proj$"),
        "but ignore in config.json names it|stored",
        toolkits=True,
    ),
    Mutation(
        "ignores_head_no_more",
        SOME_SCALED,
        lambda files: files.quantization["ignore"].remove("lm_head"),
        "lacks lm_head",
        recorded=True,
    ),
    Mutation("ignores_unknown", SOME_SCALED, ignore_more("model.vision.head"), None),
    Mutation(
        "other_targets",
        SOME_SCALED,
        lambda files: files.quantization["config_groups"]["group_0"].update(targets=["Linear", "re:.*lm_head$"]),
        "were changed",
        recorded=True,
    ),
    *(
        Mutation(
            f"{key}_{value!r}"[:40],
            (SOME[turn % len(SOME)],),
            configure(**{key: value}),
            f"{key}|has shape",
            toolkits=True,
        )
        for key, values in (
            ("hidden_size", ("128", 128.0, True, 0, -1, 10**30, [128], 64)),
            ("vocab_size", ("512", 510, 10**30)),
            ("num_hidden_layers", ("2", 1, 3, 60_000)),
        )
        for turn, value in enumerate(values)
    ),
    Mutation(
        "heads", SOME, configure(num_attention_heads=2), "num_attention_heads 2, 4 was", toolkits=True, recorded=True
    ),
    Mutation("key_heads", SOME, configure(num_key_value_heads=1), "num_key_value_heads", toolkits=True, recorded=True),
    Mutation("expert_width", SOME, configure(moe_intermediate_size=48), "moe_intermediate_size 48", toolkits=True),
    Mutation("experts_per_token", SOME, configure(num_experts_per_tok=1), None),
    Mutation("positions", SOME, configure(max_position_embeddings=128), None),
    Mutation(
        "deep",
        SOME,
        rewrite(lambda c: c[:-1] + b', "a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "config.json"),
        "nested deeper|cannot be read",
        False,
        toolkits=True,
    ),
    Mutation("key_twice", SOME, rewrite(repeat_a_key, "config.json"), "has the key 'model_type' twice", saved=False),
    Mutation(
        "not_utf8",
        SOME,
        rewrite(lambda content: content.replace(b'"', b'"\xff', 1), "config.json"),
        "cannot be read",
        False,
        toolkits=True,
    ),
    Mutation(
        "long_number",
        SOME,
        rewrite(lambda content: content.replace(b"{", b'{"a": ' + b"9" * 10_000 + b", ", 1), "config.json"),
        "cannot be read",
        False,
        toolkits=True,
    ),
    # the entry
    Mutation("many_layers", SOME[:1], change_entry(many_layers), "names 60000 layers, at most 1000"),
    Mutation(
        "narrower_widths", SOME, change_entry(narrower), "has shape|config.json has|has width|different|expected a"
    ),
    Mutation(
        "huge_width", SOME, change_entry(lambda entry: entry.update(intermediate_size=10**30)), "at most 16777216"
    ),
    Mutation("no_checksum", SOME, lambda files: files.entry.pop("sha256"), "has no sha256"),
    Mutation("wrong_checksum", SOME, lambda files: files.entry.update(block_size=1), "does not match its sha256"),
    Mutation("no_record", SOME, change_entry(lambda entry: entry.pop("contents", None)), None),
    *(
        Mutation(
            f"record_{name}", SOME, change_entry(lambda entry, to=to: to(entry["contents"])), "damaged", recorded=True
        )
        for name, to in (
            ("number", lambda contents: contents.update(tensors=3)),
            ("kinds", lambda contents: contents["tensors"].update({"lm_head.weight": [["F32"]]})),
            ("ranges", lambda contents: contents["tensors"].update({"lm_head.weight": [["F32", [1], "0-999999999"]]})),
            ("sizes", lambda contents: contents.update(sizes=[1])),
            ("layer", lambda contents: contents["tensors"].update({"a.*.experts.*.b": [["F32", None, "99"]]})),
        )
    ),
)
