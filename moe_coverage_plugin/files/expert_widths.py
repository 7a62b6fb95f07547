"""Checks the tensors of experts against their widths."""

from __future__ import annotations

from collections.abc import Mapping

from moe_coverage_plugin.expert_scheme import PROJECTIONS
from moe_coverage_plugin.files.expert_tensors import ExpertTensors, is_down
from moe_coverage_plugin.files.headers import Tensors
from moe_coverage_plugin.files.storage import PACKED, WEIGHT, Modules
from moe_coverage_plugin.manifest import CoverageError, Manifest

AGAIN = "copy the checkpoint again, or save the model again"


def check_expert_names(experts: ExpertTensors, manifest: Manifest) -> None:
    """Check that every kept expert has three weights, and no other expert has tensors.

    Args:
        experts: of :func:`~.expert_tensors.find_experts`.
        manifest: widths of the experts.

    Raises:
        CoverageError: a weight is missing or left over.
    """
    for layer, expert in experts:
        if expert >= len(manifest.widths.get(layer, [])):
            raise CoverageError(
                f"the checkpoint holds expert {expert} of {layer}, which the manifest does not name: tensors and "
                f"widths belong to different checkpoints, {AGAIN}"
            )
    for layer, widths in manifest.widths.items():
        for expert, width in enumerate(widths):
            projections = experts.get((layer, expert), {})
            weights = _weights(projections)
            expected = len(PROJECTIONS) if width else 0
            if len(weights) != expected or len(projections) != expected:
                raise CoverageError(
                    f"{layer} expert {expert} has width {width} and so {expected} weights, the checkpoint holds "
                    f"{len(weights)} ({', '.join(sorted(weights.values())) or 'none'}): {AGAIN}"
                )


def check_expert_shapes(
    tensors: Tensors,
    experts: ExpertTensors,
    manifest: Manifest,
    modules: Modules,
    unpacked: Mapping[str, tuple[int, ...]],
) -> None:
    """Check that every weight of an expert has the width of the expert, and is stored as in others of its layer.

    Args:
        tensors: of the checkpoint.
        experts: of :func:`~.expert_tensors.find_experts`.
        manifest: widths of the experts.
        modules: of :func:`~.storage.modules_of`.
        unpacked: shapes of packed weights before packing, by module.

    Raises:
        CoverageError: a weight has another width, or experts of a layer are stored in several ways.
    """
    hidden: set[int] = set()
    for layer, widths in manifest.widths.items():
        stored: dict[str, tuple[str, str]] = {}
        for expert, width in enumerate(widths):
            projections = experts.get((layer, expert), {})
            for projection, name in _weights(projections).items():
                module = name.rpartition(".")[0]
                if manifest.layout == "ragged":
                    parts = ",".join(sorted(modules[module])) + tensors[name].dtype.replace("BF16", "F16")
                    first_name, first = stored.setdefault(projection, (name, parts))
                    if first != parts:
                        raise CoverageError(
                            f"{name} is stored in another way than {first_name}, but all experts of a layer need one "
                            f"scheme: {AGAIN}"
                        )
                shape = unpacked.get(module, tensors[name].shape)
                hidden.add(_check_width(name, tensors[name].shape, shape, width, projection))
            _check_biases(tensors, projections, width)
    if len(hidden) > 1:
        raise CoverageError(
            f"experts read and write states of {' and '.join(map(str, sorted(hidden)))} features, all need one "
            f"number: the files are of two checkpoints, {AGAIN}"
        )


def _weights(projections: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the names of an expert's weights, by projection."""
    return {
        projection: parts.get(WEIGHT) or parts[PACKED]
        for projection, parts in projections.items()
        if parts.keys() & {WEIGHT, PACKED}
    }


def _check_width(name: str, stored: tuple[int, ...], shape: tuple[int, ...], width: int, projection: str) -> int:
    """Return the hidden size.

    Args:
        name: of the tensor.
        stored: its shape.
        shape: that of the weight before packing.
        width: of the expert.
        projection: name of the projection.
    """
    rows, columns = shape if len(shape) == 2 else (-1, -1)
    down = is_down(projection)
    # 4-bit floats are in pairs and have no other record of their shape
    inputs = 2 * columns if name.endswith(PACKED) and stored == shape else columns
    if (inputs if down else rows) != width:
        raise CoverageError(
            f"{name} has shape {list(stored)}, which is not the shape of width {width}: tensors and widths belong to "
            "different checkpoints, save the model again"
        )
    return rows if down else inputs


def _check_biases(tensors: Tensors, projections: Mapping[str, Mapping[str, str]], width: int) -> None:
    for projection, parts in projections.items():
        if (name := parts.get("bias")) is not None and not is_down(projection) and tensors[name].shape != (width,):
            raise CoverageError(
                f"{name} has shape {list(tensors[name].shape)}, which is not the shape of width {width}: tensors and "
                "widths belong to different checkpoints, save the model again"
            )
