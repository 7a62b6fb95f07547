"""The table of patches and the code agree, and patches of the compressing half are still needed.

Each of the latter tests runs another package without one of our patches and finds the fault, so it fails when the
patch can go. ``docs/patches.md`` says what to remove then.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from importlib.util import find_spec
from inspect import getsource, signature
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers.core_model_loading as core_model_loading
import transformers.modeling_utils as modeling_utils
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.offload import OffloadCache, disable_offloading, offload_module
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.initialize import initialize_qparams
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from datasets import Dataset
from llmcompressor.core import CompressionLifecycle, State
from llmcompressor.datasets import utils as toolkit_datasets
from llmcompressor.entrypoints.oneshot import Oneshot
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes, linearize_moe
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import ConstantPruningModifier
from llmcompressor.recipe import Recipe
from llmcompressor.recipe.utils import append_recipe_dict
from llmcompressor.transformers.compression import compressed_tensors_utils as toolkit_saving
from llmcompressor.utils.dist import broadcast_qparams_and_cleanup
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.quantizers.auto import AutoHfQuantizer

from moe_coverage_plugin.checkpoint.expert_names import fast_renaming

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "moe_coverage_plugin"
FOLDERS = (PACKAGE, *(REPOSITORY / name for name in ("tests", "benchmarks", "examples", "requirements")))
COMMENT = re.compile(r"^\s*# patch: ([a-z0-9-]+)$", re.MULTILINE)
# packages whose tests run in the serving environment
SERVING = ("vLLM", "Triton", "lm-eval")


class Patch(NamedTuple):
    """A row of the table."""

    key: str
    package: str
    files: list[str]
    what: str
    upstream: str
    goes_when: str
    tests: list[str]


def patches() -> list[Patch]:
    lines = (REPOSITORY / "docs" / "patches.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    names = re.compile(r"`([^`]+)`")
    return [Patch(row[0].strip("`"), row[1], names.findall(row[2]), *row[3:6], names.findall(row[6])) for row in cells]


def comments() -> set[tuple[str, str]]:
    """Key and file of every comment."""
    files = [REPOSITORY / "Makefile", *(file for folder in FOLDERS for file in sorted(folder.rglob("*.py")))]
    return {(key, shown(file)) for file in files for key in COMMENT.findall(file.read_text(encoding="utf-8"))}


def shown(file: Path) -> str:
    """The path of a file as the table has it."""
    return str(file.relative_to(PACKAGE if file.is_relative_to(PACKAGE) else REPOSITORY))


def test_every_patch_is_in_the_table_and_every_row_is_a_patch() -> None:
    assert comments() == {(patch.key, file) for patch in patches() for file in patch.files}


def test_rows_are_complete() -> None:
    keys = [patch.key for patch in patches()]
    assert len(keys) == len(set(keys)) > 20
    for patch in patches():
        assert patch.what, patch
        assert patch.goes_when, patch
        assert patch.upstream or patch.key.startswith("tests-"), patch


@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.key)
def test_tests_of_a_patch_exist(patch: Patch) -> None:
    file, *names = patch.tests if patch.tests and "/" in patch.tests[0] else ("", *patch.tests)
    home = REPOSITORY / (
        file or ("tests/serving/test_patches.py" if patch.package in SERVING else "tests/test_patches.py")
    )
    for name in names:
        assert re.search(rf"^def {name}\(", home.read_text(encoding="utf-8"), re.MULTILINE), f"{home}: {name}"


# --- llm-compressor


def test_toolkit_loads_no_entry_points() -> None:
    spec = find_spec("llmcompressor")
    assert spec is not None
    assert spec.origin is not None
    files = Path(spec.origin).parent.rglob("*.py")
    assert not [file for file in files if "entry_points" in file.read_text(encoding="utf-8")]


def test_state_has_no_output_directory() -> None:
    assert not {"output_dir", "pipeline", "processor", "tokenizer"} & State.__dataclass_fields__.keys()


def test_toolkit_keeps_all_that_it_loads(tmp_path: Path) -> None:
    """Nothing is released before the context ends."""
    linears = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    for linear in linears:
        offload_module(linear, "cpu", "disk", offload_dir=str(tmp_path))
    with disable_offloading():
        for linear in linears:
            linear(torch.ones(1, 2))
        assert len(OffloadCache.keep_onloaded_values) == 4
    assert not OffloadCache.keep_onloaded_values


def test_recipe_args_are_stored_only() -> None:
    recipe = Recipe.from_modifiers(ConstantPruningModifier(targets=["a"]))
    recipe.args = {"targets": ["b"]}
    assert [modifier.targets for modifier in recipe.modifiers] == [["a"]]
    # nothing else is done with them
    assert "self.recipe.args = {**recipe_args}\n\n" in getsource(CompressionLifecycle.initialize)


def test_toolkit_computes_experts_one_after_another() -> None:
    assert re.search(r"\bfor \w+ in range\(|\bfor .* in enumerate\(", getsource(LinearExperts2D.forward))


def test_toolkit_leaves_modules_on_cpus_out_of_the_exchange() -> None:
    assert signature(broadcast_qparams_and_cleanup).parameters["skip_cpu"].default is True
    assert "skip_cpu" not in getsource(GPTQModifier)


def test_toolkit_does_not_find_experts_in_a_list() -> None:
    expert = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("gate_proj", "up_proj", "down_proj")})
    moe = torch.nn.ModuleDict({"gate": torch.nn.Linear(4, 2), "experts": torch.nn.ModuleList([expert, expert])})
    assert get_non_linearized_moes(moe) == []


def test_ranks_draw_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler of each rank numbers its part from 0, and the loader reads these rows of the entire data set."""
    dataset = Dataset.from_dict({"input_ids": [[each] for each in range(4)]})
    options = SimpleNamespace(num_calibration_samples=None, shuffle_calibration_samples=False, batch_size=1)
    monkeypatch.setattr(toolkit_datasets, "_is_dist_and_same_ds", lambda _: True)
    monkeypatch.setattr(toolkit_datasets, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 2))
    drawn = []
    for part in ((0, 2), (2, 4)):
        monkeypatch.setattr(toolkit_datasets, "_get_partition_start_end", lambda *_, part=part: part)
        drawn.append(sorted(toolkit_datasets._make_sampler(options, dataset)))  # pyright: ignore[reportArgumentType]
    assert drawn[0] == drawn[1]


def test_the_check_of_models_reads_the_file() -> None:
    assert "AutoConfig.from_pretrained" in getsource(inspect.unwrap(Oneshot.validate_model))


def test_saving_has_no_hook() -> None:
    assert [*inspect.signature(toolkit_saving.modify_save_pretrained).parameters] == ["model"]


def test_saving_a_copy_saves_the_original() -> None:
    model = torch.nn.Module()
    saved: list[torch.nn.Module] = []

    def save_pretrained(self: torch.nn.Module, *_args: object, **_options: object) -> None:
        saved.append(self)
        raise InterruptedError

    model.save_pretrained = MethodType(save_pretrained, model)  # type: ignore[assignment]
    toolkit_saving.modify_save_pretrained(model)  # type: ignore[arg-type]
    with pytest.raises(InterruptedError):
        copy.deepcopy(model).save_pretrained("out")  # type: ignore[operator]
    assert saved == [model]


def test_saving_replaces_the_config() -> None:
    assert "resave_config(model.config, save_dir)" in getsource(toolkit_saving.modify_save_pretrained)


def test_saving_copies_layers_that_predict_several_tokens() -> None:
    save = "save_mtp_tensors_to_checkpoint(model.name_or_path, save_dir)"
    assert save in getsource(toolkit_saving.modify_save_pretrained)


def test_saving_needs_the_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Repo id must be in the form"):
        toolkit_saving.infer_recipe_from_model_path(str(tmp_path / "gone"))


def test_classes_of_experts_cannot_be_pickled() -> None:
    made = LinearExperts2D.get_linear_experts_cls(OlmoeExperts)
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(made)


def test_each_save_adds_a_hook_that_decompresses() -> None:
    model = torch.nn.Linear(1, 1)
    for _ in range(2):
        ModelCompressor().add_decompress_hook(model)
    ModelCompressor().remove_decompression_hook(model)
    assert len(model._forward_pre_hooks) == 1


def test_numbered_stages_are_skipped() -> None:
    stages = {f"{name}_stage": {"a_modifiers": {"ConstantPruningModifier": {"targets": ["a"]}}} for name in "ab"}
    assert len(Recipe.from_dict(stages).modifiers) == 2
    assert [*append_recipe_dict({"a_stage": {}}, {"a_stage": {}})] == ["a_stage_0", "a_stage_1"]
    assert not Recipe.from_dict({"a_stage_0": stages["a_stage"]}).modifiers


def test_scales_are_left_as_allocated() -> None:
    source = getsource(initialize_qparams)
    assert "torch.empty" in source
    assert "nan" not in source.lower()


def test_the_recipe_is_that_of_the_session() -> None:
    assert "active_session().lifecycle.recipe" in getsource(toolkit_saving.update_and_save_recipe)


def test_recipes_are_written_with_python_objects() -> None:
    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    assert "!!python/object/apply" in Recipe.from_modifiers([GPTQModifier(config_groups=groups)]).yaml()


def test_linearized_models_have_no_conversions_for_saving() -> None:
    assert "conversion" not in getsource(linearize_moe).partition('"""\n    non_linearized')[2]


@pytest.mark.parametrize("renames", [False, True])
def test_saving_compiles_an_expression_for_each_tensor(renames: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    initialize = core_model_loading.WeightTransform.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        initialize(self, *args, **kwargs)

    conversions = [
        # what the toolkit's loading leaves, and a family with names and a prefix of its own
        core_model_loading.WeightRenaming(r"\.experts\.(\d+)\.up_proj\.", r".experts.\1.up_proj."),
        core_model_loading.WeightRenaming(r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate_proj."),
        core_model_loading.PrefixChange(prefix_to_remove="base"),
    ]
    conversions = conversions if renames else []
    monkeypatch.setattr(core_model_loading.WeightTransform, "__init__", counted)
    model = SimpleNamespace(_weight_conversions=conversions, config=None)
    names = ("up_proj.weight", "gate_proj.weight_packed", "gate_proj.bias", "down_proj.weight")
    paths = [f"layers.{layer}.experts.{expert}" for layer in (10, 2) for expert in (11, 3)]
    state = {f"{path}.{name}": torch.empty(1) for path in paths for name in names}
    found = core_model_loading.revert_weight_conversion(model, state)  # pyright: ignore[reportArgumentType]
    assert len(made) == len(state) + len(conversions)
    saving: Any = modeling_utils
    with fast_renaming():
        ours = saving.revert_weight_conversion(model, state)
    assert len(made) == len(state) + 2 * len(conversions)
    assert list(ours) == list(found)
    assert ("base.layers.2.experts.3.w1.bias" in ours) == renames
    assert {name: id(tensor) for name, tensor in ours.items()} == {name: id(tensor) for name, tensor in found.items()}
    assert saving.revert_weight_conversion is core_model_loading.revert_weight_conversion


# --- compressed-tensors


def test_empty_zero_points_are_not_packed() -> None:
    weights = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=32)
    state = {
        "weight": torch.empty(64, 64, device="meta"),
        "weight_scale": torch.empty(64, 2, device="meta"),
        "weight_zero_point": torch.empty(64, 2, dtype=torch.int8, device="meta"),
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    packed = PackedQuantizationCompressor.compress(state, scheme)
    assert packed["weight_packed"].shape == (64, 8)
    assert packed["weight_zero_point"].shape == (64, 2)


def test_decompression_dispatches_the_model() -> None:
    assert "from_accelerate(model)" in getsource(ModelCompressor.decompress_model)


def test_tokens_of_a_matrix_share_a_scale() -> None:
    tokens = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
    x_TH = torch.tensor([[1.0, 2.0], [100.0, 3.0]])
    scales = [compute_dynamic_scales_and_zp(x, tokens, torch.nn.Linear(2, 2))[0] for x in (x_TH, x_TH[None])]
    assert [scale.numel() for scale in scales] == [1, 2]


# --- transformers and others


def test_unknown_quantization_methods_are_passed_over() -> None:
    assert not AutoHfQuantizer.supports_quant_method({"quant_method": "unknown"})


def test_moving_does_not_unpack_4_bit_weights() -> None:
    from bitsandbytes.nn.modules import Params4bit

    assert "packing_format_for_cpu" in getsource(Params4bit.cuda)
    assert "packing_format_for_cpu" not in getsource(Params4bit.to)


def test_torch_cannot_release_memory_of_cpus() -> None:
    assert not hasattr(torch.cpu, "release_unused_memory")
