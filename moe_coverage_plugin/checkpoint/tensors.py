"""Reads the tensors of a checkpoint into a model, and compares every one of them with the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from moe_coverage_plugin.files.headers import Tensors
from moe_coverage_plugin.files.weights import open_weights
from moe_coverage_plugin.manifest import CoverageError


def read_tensors(model: PreTrainedModel, tensors: Tensors, dtype: torch.dtype | None) -> None:
    """Assign every tensor of a checkpoint to the parameter or buffer of its name.

    Args:
        model: without weights; its tensors have the shapes and dtypes of those in the files.
        tensors: headers of one checkpoint, checked.
        dtype: cast floating-point tensors to it; not given, they keep their dtypes.

    Raises:
        CoverageError: a tensor is missing, left over, or has another shape or dtype than the model.
    """
    expected = names_on_disk(model)
    _check_names(tensors.keys(), expected.keys())
    dtype_of = parameter_dtypes(model, dtype) if dtype is not None else None
    names_in: dict[Path, list[str]] = defaultdict(list)
    for name, header in tensors.items():
        names_in[header.file].append(name)
    for file, disk_names in tqdm(names_in.items(), desc="Loading", disable=None):
        state: dict[str, Tensor] = {}
        with open_weights(file) as shard:
            for disk_name in disk_names:
                name, wanted = expected[disk_name]
                tensor = shard.get_tensor(disk_name)
                _check_tensor(model, disk_name, name, tensor, wanted)
                state[name] = tensor.to(dtype_of(name)) if dtype_of and tensor.is_floating_point() else tensor
        model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    assert not any(parameter.is_meta for parameter in model.parameters()), "a parameter has no value"


def parameter_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """Return the dtype of a floating-point tensor by its name, if the model is cast to ``dtype``.

    Families keep some tensors, such as correction biases, in float32.
    """
    plan = model._get_dtype_plan(dtype)
    return lambda name: next((kept for part, kept in plan.items() if part in name), dtype)


def names_on_disk(model: PreTrainedModel) -> dict[str, tuple[str, Tensor]]:
    """Return for the name of every tensor in the files its name in the model, and the tensor there, without values.

    Copies of tied tensors are not in the files.

    Raises:
        CoverageError: the family stores a tensor that is merged from several tensors of the model.
    """
    # not every family's config has the field
    ties = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    tied = set(model.all_tied_weights_keys) if ties else set()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    name_of = {id(tensor): name for name, tensor in state.items()}
    on_disk = revert_weight_conversion(model, dict(state))
    merged = [disk_name for disk_name, tensor in on_disk.items() if id(tensor) not in name_of]
    if merged:
        raise CoverageError(
            f"{type(model).__name__} stores {merged[0]} merged from several tensors, which load() does not support: "
            "serve the checkpoint in vLLM"
        )
    return {disk_name: (name_of[id(tensor)], tensor) for disk_name, tensor in on_disk.items()}


def _check_names(found: Collection[str], expected: Collection[str]) -> None:
    """The record of a checkpoint's contents has the same names, but checkpoints of release 0.1 have no record."""
    if left_over := sorted(set(found) - set(expected)):
        raise CoverageError(
            f"the checkpoint holds {left_over[0]}, which the model described by its manifest does not have: weights "
            "and config.json are not of the same checkpoint, copy it again"
        )
    if missing := sorted(set(expected) - set(found)):
        raise CoverageError(
            f"the checkpoint lacks {len(missing)} tensors, first {missing[0]}: it was not written or copied "
            "completely, copy it again"
        )


def _check_tensor(model: PreTrainedModel, disk_name: str, name: str, tensor: Tensor, wanted: Tensor) -> None:
    if tensor.shape != wanted.shape:
        raise CoverageError(
            f"{disk_name} has shape {list(tensor.shape)}, the manifest says {list(wanted.shape)}: weights and "
            "config.json are not of the same checkpoint, copy it again"
        )
    # other floats can be cast, but numbers of one byte mean something only with their scales
    one_byte = 1 in (tensor.itemsize, wanted.itemsize)
    if tensor.is_floating_point() != wanted.is_floating_point() or (one_byte and tensor.dtype != wanted.dtype):
        raise CoverageError(
            f"{disk_name} has dtype {tensor.dtype}, {wanted.dtype} was written: the file is damaged, copy the "
            "checkpoint again"
        )
    module, _, attribute = name.rpartition(".")
    if attribute == "weight_shape":
        # the shape of a weight before packing, which decompression relies on
        shape = _unpacked_shape(model.get_submodule(module))
        if tensor.tolist() != shape:
            raise CoverageError(
                f"{disk_name} says {tensor.tolist()}, the manifest says {shape}: the file is damaged, copy the "
                "checkpoint again"
            )


def _unpacked_shape(module: Module) -> list[int]:
    if isinstance(module, Embedding):
        return [module.num_embeddings, module.embedding_dim]
    linear = cast(Linear, module)
    return [linear.out_features, linear.in_features]
