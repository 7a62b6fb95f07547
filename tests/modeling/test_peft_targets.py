"""Adapters of peft on models with linear experts: they train experts, merge, are saved and opened again.

Field case 2.11: peft rewrote the targets of families with fused experts, so that experts stayed frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmcompressor.modeling.moe.linearize import linearize_moe
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora.dora import DoraLinearLayer
from peft.utils import transformers_weight_conversion as conversions
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from moe_coverage_plugin import CoverageError, load
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.modeling.peft_targets import has_linear_experts
from tests.checkpoint.runs import SPARSITY, logits, prompt, prune, source

pytestmark = pytest.mark.slow

TARGETS = ["gate_proj", "up_proj", "down_proj", "q_proj"]
FAMILIES = ("qwen3_moe", "mixtral")
# merged weights are rounded once more
CLOSE = {"rtol": 1e-4, "atol": 5e-5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """Returns the pruned checkpoint of a family, some of whose experts are removed unless it is padded."""
    directory = tmp_path_factory.mktemp("adapters")

    def make(family: str, layout: str = "ragged") -> Path:
        output = directory / f"{family}_{layout}"
        if not output.exists():
            sparsity = SPARSITY.get(family, 0.4)
            prune(source(directory / f"{family}_{layout}_source", family), output, layout, sparsity=sparsity)
        return output

    return make


def adapt(model: Any, **options: Any) -> PeftModel:
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, **options))
    assert isinstance(adapted, PeftModel)
    return adapted


def train(model: Any, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(input_ids=prompt(), labels=prompt()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    assert losses[-1] < losses[0]
    return losses


def trained(model: Any) -> set[str]:
    """Modules that have adapters, without the prefix of peft."""
    names = [
        name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad and ".lora_" in name
    ]
    return {name.removeprefix("base_model.model.").replace(".base_layer", "") for name in names}


def expert_projections(model: Any) -> set[str]:
    modules = dict(model.named_modules())
    names = {f"{layer.name}.{e}" for layer in find_moe_layers(model) for e, width in enumerate(layer.widths) if width}
    return {name for name in modules if name.rpartition(".")[0] in names and name.endswith("_proj")}


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_train_every_expert_and_merge(checkpoint, tmp_path, family, layout, dora):
    """Field case 2.11; padded experts have rows of zeros, by whose norm DoRA divides."""
    path = checkpoint(family, layout)
    before = load(path)
    experts = expert_projections(before)
    adapted = adapt(load(path), target_modules=TARGETS, use_dora=dora)
    assert experts <= trained(adapted)
    assert torch.allclose(logits(adapted), logits(before), **CLOSE)
    train(adapted)
    after = logits(adapted)
    assert after.isfinite().all()
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(path), str(tmp_path / "adapter"))
    assert torch.equal(logits(again), after)
    merged = adapted.merge_and_unload()
    assert torch.allclose(logits(merged), after, **CLOSE)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(load(tmp_path / "merged")), after, **CLOSE)
    changed = [name for name in experts if not torch.equal(weight(merged, name), weight(before, name))]
    # the few tokens do not reach each expert
    assert len(changed) > len(experts) / 2


def weight(model: Any, name: str) -> torch.Tensor:
    return model.get_submodule(name).weight


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("options", "reached"),
    [
        ({"target_modules": "all-linear"}, ("o_proj", "down_proj")),
        ({"target_modules": r".*\.experts\.\d+\.(gate|up|down)_proj"}, ("gate_proj", "up_proj", "down_proj")),
        ({"target_modules": ["down_proj"]}, ("down_proj",)),
        ({"target_parameters": ["down_proj.weight"]}, ("down_proj",)),
        ({"target_modules": [*TARGETS, "gate"]}, ("gate", "up_proj")),
        ({"target_modules": TARGETS, "modules_to_save": ["lm_head", "gate"]}, ("up_proj",)),
        ({"target_modules": TARGETS, "rank_pattern": {"down_proj": 2}}, ("up_proj",)),
    ],
    ids=["all-linear", "pattern", "one projection", "parameters", "router", "saved modules", "ranks"],
)
def test_every_way_to_name_targets_reaches_experts(checkpoint, tmp_path, family, options, reached):
    """Field case 2.11: siblings of a list of names."""
    adapted = adapt(load(checkpoint(family)), **options)
    found = trained(adapted)
    for projection in reached:
        assert any(name.endswith(f".{projection}") for name in found)
    assert all(name in found for name in expert_projections(load(checkpoint(family))) if name.endswith("down_proj"))
    train(adapted)
    after = logits(adapted)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(load(tmp_path / "merged")), after, **CLOSE)


def test_layers_to_transform_are_layers_of_the_model(checkpoint):
    """Field case 2.11: the number of an expert is not that of a layer."""
    found = trained(adapt(load(checkpoint("qwen3_moe")), target_modules=TARGETS, layers_to_transform=[1]))
    experts = {name for name in expert_projections(load(checkpoint("qwen3_moe"))) if ".layers.1." in name}
    assert experts < found
    assert all(".layers.1." in name for name in found)


def test_families_without_rewritten_targets(checkpoint):
    """Shared experts and dense layers have projections of the same names."""
    path = checkpoint("deepseek_v3")
    adapted = adapt(load(path), target_modules=TARGETS)
    assert expert_projections(load(path)) < trained(adapted)
    train(adapted)


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({"target_modules": ["w1", "w2", "w3", "q_proj"]}, "w1"),
        ({"target_modules": ["q_proj", "gate_up_proj"]}, "gate_up_proj"),
        ({"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}, "experts.gate_up_proj"),
        ({"target_parameters": ["mlp.experts.down_proj", "down_proj.weight"]}, "mlp.experts.down_proj"),
    ],
    ids=["names in files", "fused module", "fused parameter", "fused parameter alone"],
)
def test_targets_of_fused_experts_stop(checkpoint, options, target):
    """Field case 2.11: peft itself would adapt the other targets and leave experts frozen."""
    with pytest.raises(CoverageError, match=rf"'{target}', which is not a .* of this model.*gate_proj"):
        adapt(load(checkpoint("mixtral")), **options)


@pytest.mark.parametrize("options", [{"target_modules": TARGETS}, {"target_modules": "all-linear", "use_dora": True}])
def test_experts_in_four_bits_are_trained(checkpoint, options):
    """Field case 2.11: QLoRA, and QDoRA, after peft's preparation."""
    pytest.importorskip("bitsandbytes")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    path = checkpoint("qwen3_moe")
    model = load(path, dtype=torch.float32, quantization_config=four_bits)
    adapted = adapt(prepare_model_for_kbit_training(model), **options)
    assert expert_projections(load(path)) <= trained(adapted)
    train(adapted)


def test_a_second_adapter(checkpoint):
    adapted = adapt(load(checkpoint("qwen3_moe")), target_modules=TARGETS)
    adapted.add_adapter("second", LoraConfig(r=2, target_modules=["down_proj"]))
    adapted.set_adapter("second")
    found = trained(adapted)
    assert found
    assert all(name.endswith("down_proj") for name in found)
    train(adapted)


def test_adapters_on_a_deep_copy(checkpoint):
    copied = copy.deepcopy(load(checkpoint("qwen3_moe")))
    assert has_linear_experts(copied)
    assert expert_projections(copied) <= trained(adapt(copied, target_modules=TARGETS))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_weights_of_adapters(checkpoint, tmp_path, family):
    """Field case 2.11: ``model.load_adapter`` renamed weights of experts, and left adapters at their first values."""
    adapted = adapt(load(checkpoint(family)), target_modules=TARGETS)
    train(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    model = load(checkpoint(family))
    model.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(logits(model), logits(adapted))


# --- the faults of peft for which there are patches


def test_peft_rewrites_targets_by_the_name_of_the_family():
    """If this fails, the patch ``peft-targets`` can go."""
    config = LoraConfig(target_modules=["down_proj"])
    model = torch.nn.Module()
    model.config = SimpleNamespace(model_type="qwen3_moe")
    original(conversions.convert_peft_config_for_transformers)(config, model, [])
    assert not config.target_modules
    assert config.target_parameters == {"down_proj"}


def test_peft_divides_by_norms_of_zero():
    """If this fails, the patch ``peft-zero-rows`` can go."""
    layer = DoraLinearLayer(fan_in_fan_out=False)
    zeros = torch.zeros(2, 2)
    assert original(DoraLinearLayer.get_weight_norm)(layer, zeros, zeros, 1.0).tolist() == [0.0, 0.0]
    assert (layer.get_weight_norm(zeros, zeros, 1.0) > 0).all()


def original(patched: Any) -> Any:
    """The function of the other package, which the patch wraps."""
    assert patched.__module__.startswith("peft")
    assert patched.__code__.co_filename.endswith("peft_targets.py"), "the patch is in place"
    return patched.__wrapped__


# --- adapters that are not merged

UNMERGED: Sequence[dict[str, Any]] = (
    {"target_modules": TARGETS},
    {"target_modules": ["q_proj"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [0]},
)


@pytest.mark.parametrize("options", UNMERGED, ids=["experts", "attention", "one layer"])
@pytest.mark.parametrize("work", ["save", "prune"])
def test_adapters_that_are_not_merged_stop(checkpoint, tmp_path, options, work):
    """Field case 2.11: the base would be written under names that nothing opens, without its adapters."""
    path = checkpoint("qwen3_moe")
    if work == "save":
        model = load(path)
    else:
        model = linearize_moe(AutoModelForCausalLM.from_pretrained(path.with_name(f"{path.name}_source")))
    model = get_peft_model(model, LoraConfig(r=2, **options)).base_model.model
    with pytest.raises(CoverageError, match=r"adapters on \d+ layers .*merge_and_unload"):
        model.save_pretrained(tmp_path / "out") if work == "save" else prune(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_transformers_added_is_saved_alone(checkpoint, tmp_path):
    model = load(checkpoint("qwen3_moe"))
    model.add_adapter(LoraConfig(r=2, target_modules=TARGETS))
    model.save_pretrained(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (tmp_path / "out" / "config.json").exists()
