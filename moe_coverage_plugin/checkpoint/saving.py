"""Writes pruned checkpoints: an ordinary compressed-tensors directory plus our entry, complete or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.distributed import is_source_process
from compressed_tensors.offload import disable_onloading, get_offloaded_device
from compressed_tensors.quantization.utils import is_module_quantized
from llmcompressor.core import active_session
from llmcompressor.transformers.utils import RECIPE_FILE_NAME
from loguru import logger
from transformers import PreTrainedModel

from moe_coverage_plugin.checkpoint.expert_names import keep_family_names, stores_single_experts
from moe_coverage_plugin.checkpoint.model_card import Origin, write_card
from moe_coverage_plugin.checkpoint.scheme_checks import check_rotations, check_schemes
from moe_coverage_plugin.expert_scheme import WIDTH_KEYS
from moe_coverage_plugin.files.atomic import check_place, in_use, remove_leftovers, write_atomically
from moe_coverage_plugin.manifest import CONFIG_KEY, REPORT_NAME, CoverageError, Layout, Manifest
from moe_coverage_plugin.modeling.moe_layers import (
    expert_linears,
    find_moe_layers,
)

STATUS_KEY = "quantization_status"
UNQUANTIZED = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
PICTURES_NAME = "moe_coverage_report"


@dataclass
class PruningRecord:
    """What a pruned model remembers about its pruning until it is saved.

    Attributes:
        companions: each writes something that belongs beside the model (a tokenizer) into a directory.
        origin: what the model card takes from that of the base.
    """

    layout: Layout
    intermediate_size: int
    block_size: int
    provenance: dict[str, Any]
    report: dict[str, Any] = field(default_factory=dict)
    companions: list[Callable[[Path], None]] = field(default_factory=list)
    origin: Origin = field(default_factory=Origin)


def describe(model: PreTrainedModel, record: PruningRecord) -> Manifest:
    """The manifest of a pruned model, its widths read off the live modules."""
    widths = {layer.name: layer.widths for layer in find_moe_layers(model)}
    return Manifest(record.layout, record.intermediate_size, widths, record.block_size, record.provenance)


def save_with_manifest(model: PreTrainedModel, record: PruningRecord) -> None:
    """Make ``model.save_pretrained`` write pruned checkpoints.

    Wraps the toolkit's own method, which must be in place. The directory appears under its name only when everything
    is in it: files are written into a hidden sibling, which is then renamed.
    """
    # a model that is pruned again has one record, the newest
    toolkit_save = getattr(model.save_pretrained, "_of_toolkit", model.save_pretrained)
    assert getattr(toolkit_save, "_overridden", False), "oneshot replaces save_pretrained before modifiers run"
    keep_family_names(model)
    model_ref = weakref.ref(model)

    @wraps(toolkit_save)
    def save_pretrained(save_directory: str | os.PathLike, **kwargs: Any) -> None:
        model = model_ref()
        assert model is not None
        if kwargs.get("push_to_hub"):
            raise CoverageError(
                "push_to_hub=True would upload before the checkpoint is complete: save, then upload_folder"
            )
        if getattr(model, "is_loaded_in_4bit", False):
            raise CoverageError(
                "weights in the 4 bits of bitsandbytes are made by load() and not saved, which no engine would open: "
                f"keep {model.name_or_path}; for a 4-bit checkpoint end the recipe with a W4A16 quantizer"
            )
        target = Path(save_directory)
        check_output(target)
        quantized = _is_quantized(model)
        if quantized:
            check_schemes(model, record.layout)
        check_rotations(model)
        if _on_disk(model):
            # transformers loads the tensors of a whole file before it writes it, and the toolkit's files hold 20 GB
            kwargs.setdefault("max_shard_size", largest_layer_bytes(model))
        with staged(target) as staging:
            toolkit_save(str(staging), **kwargs)
            if is_source_process():
                _keep_recipe(model, staging)
                (staging / REPORT_NAME).write_text(json.dumps(record.report, indent=1))
                for write_companion in record.companions:
                    write_companion(staging)
                found_by_stock = stores_single_experts(model)
                open_to_all = record.layout != "ragged" and not quantized and found_by_stock
                manifest = describe(model, record)
                name = target.absolute().name
                write_card(staging, name, manifest, record.report, record.origin, quantized, open_to_all)
                # last: without its entry nobody takes the directory for a checkpoint
                write_entry(staging, manifest, quantized, open_to_all, found_by_stock)
        if is_source_process():
            stored = sum(file.stat().st_size for file in target.glob("*.safetensors"))
            logger.info(f"Saved {target}: {stored / 2**20:.1f} MiB of weights")

    # the toolkit's mark: it leaves a method that carries it alone when the model enters oneshot again
    save_pretrained._overridden = True  # type: ignore[attr-defined]
    save_pretrained._of_toolkit = toolkit_save  # type: ignore[attr-defined]
    save_pretrained._record = record  # type: ignore[attr-defined]
    model.save_pretrained = save_pretrained  # type: ignore[method-assign]


def record_of(model: PreTrainedModel) -> PruningRecord:
    """What a pruned model will write beside its weights; to be added to by who changes the weights further."""
    record = getattr(model.save_pretrained, "_record", None)
    assert isinstance(record, PruningRecord), "the model is not pruned"
    return record


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A directory to write into, which is renamed to ``target`` when the ``with`` block ends and deleted if it fails.

    A process that is killed leaves a directory without ``config.json``, because the file that the block finds under
    that name is a link to an open file; the block must replace it as its last step, as :func:`write_entry` does.
    Engines would take a directory with a config for a checkpoint, and fill in missing weights at random.
    """
    target = _followed(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        # mkdtemp is private to its user, a checkpoint is not
        umask = os.umask(0)
        os.umask(umask)
        staging.chmod(0o777 & ~umask)
        with in_use(staging), tempfile.TemporaryFile() as unnamed:
            _link_config(staging, unnamed.fileno())
            yield staging
            if is_source_process():
                assert not (staging / "config.json").is_symlink(), "the with block must replace config.json"
                os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _link_config(directory: Path, handle: int) -> None:
    """Let what is written to ``config.json`` go to an open file, which is gone with this process."""
    opened = Path(f"/proc/{os.getpid()}/fd/{handle}")
    # other systems than Linux do not have it, nor every file system links
    if opened.exists():
        with suppress(OSError):
            (directory / "config.json").symlink_to(opened)


def _followed(target: Path) -> Path:
    # a directory is renamed over another one, not over a link to it
    return Path(os.path.realpath(target))


def check_output(target: Path, needed_bytes: int = 0) -> None:
    """Refuse an output directory that cannot take a checkpoint, and remove what runs that died left beside it.

    Raises:
        CoverageError: it is not empty, cannot be created or replaced, or the disk has less than ``needed_bytes`` free.
    """
    target = _followed(target)
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise CoverageError(f"output {target} exists and is not empty: choose another directory, or empty this one")
    if target.is_dir() and (os.path.ismount(target) or target.samefile(".")):
        kind = "a mount point" if os.path.ismount(target) else "the current directory"
        raise CoverageError(
            f"output {target} is {kind}, which a checkpoint that is complete cannot replace: name a new directory in "
            f"it, {target / 'checkpoint'}"
        )
    for leftover in remove_leftovers(target):
        logger.info(f"Removed {leftover}, which a run that died has left")
    free = shutil.disk_usage(check_place(target)).free
    if free < needed_bytes:
        raise CoverageError(
            f"output {target} needs about {needed_bytes / 2**30:.1f} GiB, its disk has {free / 2**30:.1f} GiB free: "
            "make room"
        )


def write_entry(
    directory: Path, manifest: Manifest, quantized: bool, open_to_all: bool = False, found_by_stock: bool = True
) -> None:
    """Add the manifest to ``config.json`` and declare a width at which stock engines stop or load rightly.

    The toolkit rewrites the file from the source model's, so this comes after it; replaced atomically.

    Args:
        open_to_all: stock engines can load the checkpoint as it is. The manifest then stands beside the
            ``quantization_config``, because transformers opens none that quantizes nothing.
        found_by_stock: stock transformers looks for single experts, and so stops at a wrong width. Where it does not,
            quantized ones get a status that it does not know and stops at; engines do not read it.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text())
    # a file inherited from the source may carry a quantization or a manifest that the model no longer has
    quantization = config.pop("quantization_config", None) if quantized else dict(UNQUANTIZED)
    config.pop(CONFIG_KEY, None)
    if open_to_all:
        config.pop("quantization_config", None)
        config[CONFIG_KEY] = manifest.to_entry()
    else:
        assert quantization is not None, "the toolkit writes what it quantized"
        status = {} if found_by_stock or not quantized else {STATUS_KEY: CONFIG_KEY}
        config["quantization_config"] = quantization | status | {CONFIG_KEY: manifest.to_entry()}
    text_config = config.get("text_config", config)
    width_key = next(key for key in WIDTH_KEYS if key in text_config)
    text_config[width_key] = manifest.declared_width
    write_atomically(path, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _keep_recipe(model: PreTrainedModel, directory: Path) -> None:
    # the toolkit appends the recipe of its last run, whichever model that was about
    source = Path(model.name_or_path or "") / RECIPE_FILE_NAME
    if active_session().state.model is not model and source.is_file():
        shutil.copyfile(source, directory / RECIPE_FILE_NAME)


def _on_disk(model: torch.nn.Module) -> bool:
    return any(get_offloaded_device(module) == "disk" for module in model.modules())


def largest_layer_bytes(model: PreTrainedModel) -> int:
    """Bytes of the experts of the layer that has most."""
    with disable_onloading():
        layers = find_moe_layers(model)
        return max(sum(p.nbytes for linear in expert_linears(layer) for p in linear.parameters()) for layer in layers)


def _is_quantized(model: torch.nn.Module) -> bool:
    return any(is_module_quantized(module) for module in model.modules())
