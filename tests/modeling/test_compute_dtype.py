"""A bfloat16 model on a processor without bfloat16 instructions computes what it does when opened in float32."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.offload import disable_onloading, set_onload_device
from compressed_tensors.offload.module import offload_module, remove_module_offload
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.utils.helpers import disable_lm_head
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from moe_coverage_plugin.calibration.gradients import GradientObserver
from moe_coverage_plugin.calibration.layer_loss import layer_loss_rise
from moe_coverage_plugin.calibration.observation import observe_batches
from moe_coverage_plugin.calibration.observer import LayerObserver
from moe_coverage_plugin.modeling import compute_dtype
from moe_coverage_plugin.modeling.compute_dtype import choose_compute_dtype, fast_compute_dtype
from moe_coverage_plugin.modeling.expert_lists import linearize_expert_lists
from moe_coverage_plugin.modeling.grouped_experts import ConvertedLinear
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.modeling.traced import hidden_states, subgraphs
from tests.tiny import CONFIGS, LISTED, listed_model, save_model, seeing_config

pytestmark = pytest.mark.slow

AVX2 = {"architecture": "x86_64", "cpu_name": "EPYC", "avx2": True, "avx512_bf16": False, "amx_bf16": False}
VISION = "qwen3_vl_moe"


@pytest.fixture(autouse=True)
def _slow_in_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: AVX2)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("source"), "qwen2_moe", torch.bfloat16, num_hidden_layers=2)


@pytest.fixture(scope="module", params=[*CONFIGS, LISTED, VISION])
def any_source(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    if request.param != VISION:
        return save_model(directory, request.param, torch.bfloat16, num_hidden_layers=2)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(seeing_config(VISION, num_hidden_layers=2)).bfloat16().save_pretrained(
        directory
    )
    return directory


def opened(source: Path, dtype: torch.dtype) -> PreTrainedModel:
    kind = AutoModelForImageTextToText if "vision_config" in (source / "config.json").read_text() else None
    if kind is None and '"deepseek"' in (source / "config.json").read_text():
        model = type(listed_model()).from_pretrained(source, dtype=dtype)
    else:
        model = (kind or AutoModelForCausalLM).from_pretrained(source, dtype=dtype, experts_implementation="eager")
        linearize_moe(model)
    linearize_expert_lists(model)
    return model.eval()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, 18:] = 0
    return [{"input_ids": torch.randint(2, 500, (2, 24), generator=generator), "attention_mask": mask}] * 2


def measured(model: PreTrainedModel, metrics: Sequence[str] = ("activation", "fisher", "snip")) -> dict[str, Tensor]:
    """Everything that the passes of calibration find."""
    layers = find_moe_layers(model)
    found = {}
    for metric in metrics:
        observers = [LayerObserver(layer, metric, None) for layer in layers]
        gradients = [GradientObserver(layer, metric) for layer in layers if metric != "activation"]
        observe_batches(model, batches(), observers, gradients)
        for each in (*observers, *gradients):
            found |= {f"{metric} {each.layer.name} {name} {type(each)}": value for name, value in each.sums.items()}
    return found | {"layer loss": layer_loss_rise(model, layers, batches(), 1.0)}


def offload(model: PreTrainedModel, place: str, directory: Path) -> None:
    options = {"offload_dir": str(directory)} if place == "disk" else {}
    for module in model.modules():
        remove_module_offload(module)
        offload_module(module, "cpu", place, **options)


def state(model: PreTrainedModel) -> dict[str, Any]:
    """What a pass must leave unchanged: tensors by identity and bits, tables, hooks and methods."""
    with disable_onloading():
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        bits = {name: tensor.clone() for name, tensor in tensors.items() if not tensor.is_meta}
    modules = dict(model.named_modules())
    return {
        "tensors": {name: (id(tensor), tensor.dtype) for name, tensor in tensors.items()},
        "bits": bits,
        "tables": {name: (id(module._parameters), id(module._buffers)) for name, module in modules.items()},
        "hooks": {
            name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in modules.items()
        },
        # the toolkit leaves the head a reference to the method of its class
        "own forward": {name for name, module in modules.items() if "forward" in module.__dict__} - {"lm_head"},
    }


def assert_unchanged(model: PreTrainedModel, before: dict[str, Any]) -> None:
    after = state(model)
    for name, tensor in before.pop("bits").items():
        assert torch.equal(after["bits"][name], tensor), name
    del after["bits"]
    assert after == before


@pytest.mark.parametrize(
    ("capabilities", "expected", "reason"),
    [
        (AVX2, torch.float32, r"EPYC \(x86_64\) has no instructions that multiply bfloat16 \(avx512_bf16, amx_bf16\)"),
        (AVX2 | {"avx512_bf16": True}, torch.bfloat16, "multiplies bfloat16 by avx512_bf16"),
        (AVX2 | {"amx_bf16": True, "avx512_bf16": True}, torch.bfloat16, "by avx512_bf16 and amx_bf16"),
        ({"architecture": "aarch64", "bf16": True}, torch.bfloat16, "multiplies bfloat16 by bf16"),
        ({"architecture": "aarch64", "bf16": False, "neon": True}, torch.float32, "no instructions .* bfloat16"),
        ({"architecture": "ppc64le"}, torch.bfloat16, "does not report whether"),
    ],
)
def test_the_processor_decides(source, capabilities, expected, reason):
    chosen = choose_compute_dtype(opened(source, torch.bfloat16), capabilities)
    assert chosen.dtype == expected
    assert re.search(reason, chosen.reason)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_stay(source, dtype, log):
    model = opened(source, dtype)
    log.clear()
    assert choose_compute_dtype(model) == (dtype, "it is the model's dtype")
    with fast_compute_dtype(model):
        assert model(**batches()[0]).logits.dtype == dtype
    assert not log


def test_models_on_a_device_stay(source):
    model = opened(source, torch.bfloat16)
    set_onload_device(model, "cuda:1")
    before = state(model)
    with fast_compute_dtype(model) as chosen:
        assert chosen == (torch.bfloat16, "the model computes on cuda:1")
        assert_unchanged(model, before)


def test_processors_that_multiply_bfloat16_stay(source, monkeypatch, log):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: AVX2 | {"amx_bf16": True})
    model = opened(source, torch.bfloat16)
    log.clear()
    before = state(model)
    with fast_compute_dtype(model):
        assert_unchanged(model, before)
        assert model(**batches()[0]).logits.dtype == torch.bfloat16
    assert not log


def test_all_passes_find_what_a_float32_model_does(any_source):
    narrow, wide = opened(any_source, torch.bfloat16), opened(any_source, torch.float32)
    before = state(narrow)
    # other metrics: in tests of one family
    found, expected = measured(narrow, ["fisher"]), measured(wide, ["fisher"])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=0, msg=lambda text, name=name: f"{name} {text}")
    assert_unchanged(narrow, before)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_models(source, tmp_path, place):
    model = opened(source, torch.bfloat16)
    offload(model, place, tmp_path)
    before = state(model)
    found, expected = measured(model), measured(opened(source, torch.float32))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=0)
    assert_unchanged(model, before)


def test_it_is_said_once_and_why(source, log):
    model = opened(source, torch.bfloat16)
    log.clear()
    with fast_compute_dtype(model) as outer, fast_compute_dtype(model) as inner:
        assert outer == inner
        measured(model, ["fisher"])
    assert log == [
        "INFO Calibration computes in float32, because EPYC (x86_64) has no instructions that multiply bfloat16 "
        "(avx512_bf16, amx_bf16) and is slow in it; the weights stay, and are saved, in bfloat16"
    ]


def test_the_inner_context_does_not_end_the_outer(source):
    model = opened(source, torch.bfloat16)
    with fast_compute_dtype(model):
        with fast_compute_dtype(model):
            pass
        assert model(**batches()[0]).logits.dtype == torch.float32
    assert model(**batches()[0]).logits.dtype == torch.bfloat16


def test_only_the_weights_in_use_are_converted(source):
    """Or a pass would take the memory of the model twice over."""
    model = opened(source, torch.bfloat16)
    sizes = []

    def count(_module: Any, _args: Any) -> None:
        sizes.append(sum(each.numel() for each in model.parameters() if each.dtype == torch.float32))

    first, second = model.model.layers
    outside_experts = sum(each.numel() for name, each in first.named_parameters() if ".experts." not in name)
    one_expert = sum(each.numel() for each in first.mlp.experts[0].parameters())
    with torch.no_grad(), fast_compute_dtype(model):
        for module in (first.mlp, first.mlp.experts[0].up_proj, second.mlp, model.model.norm, model.lm_head):
            module.register_forward_pre_hook(count)
        model(**batches()[0])
    head = [model.model.norm.weight.numel(), model.lm_head.weight.numel()]
    assert sizes == [outside_experts, outside_experts + one_expert, outside_experts, *head]


@pytest.mark.parametrize("place", [None, "cpu", "disk"])
@pytest.mark.parametrize(("free", "conversions"), [(2**40, 1), (0, 3)], ids=["enough memory", "too little memory"])
def test_many_calls_convert_once(source, tmp_path, monkeypatch, place, free, conversions):
    """If there is memory for it: a model that generates is called for each token."""
    monkeypatch.setattr(compute_dtype, "free_host_memory", lambda: free)
    model, wide = opened(source, torch.bfloat16), opened(source, torch.float32)
    if place:
        offload(model, place, tmp_path)
    before = state(model)
    convert, converted = compute_dtype._Float32Weights.convert, []
    monkeypatch.setattr(
        compute_dtype._Float32Weights, "convert", lambda self: (converted.append(self._unit), convert(self))
    )
    with torch.no_grad(), fast_compute_dtype(model, for_many_calls=True):
        for _ in range(3):
            torch.testing.assert_close(model(**batches()[0]).logits, wide(**batches()[0]).logits, rtol=1e-6, atol=1e-6)
    assert converted.count(model.lm_head) == conversions
    assert_unchanged(model, before)


def test_the_graph_keeps_the_weights_of_grouped_experts_unconverted():
    weight_OA, x_MA = torch.randn(4, 8).bfloat16(), torch.randn(3, 8, requires_grad=True)
    y_MO = ConvertedLinear.apply(x_MA, weight_OA, None)
    (saved,) = y_MO.grad_fn.saved_tensors
    assert saved.data_ptr() == weight_OA.data_ptr()
    (grad_MA,) = torch.autograd.grad(y_MO.square().sum(), x_MA)
    (expected,) = torch.autograd.grad(linear(x_MA, weight_OA.float()).square().sum(), x_MA)
    assert torch.equal(grad_MA, expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("gradients", [False, True])
def test_an_error_leaves_the_model_as_it_was(source, error, gradients):
    model = opened(source, torch.bfloat16)
    layers = find_moe_layers(model)
    before = state(model)

    def fail(*_args: Any) -> None:
        raise error

    handle = layers[1].router.register_forward_hook(fail)
    metric = "fisher" if gradients else "activation"
    observers = [LayerObserver(layer, metric, None) for layer in layers]
    with pytest.raises(error):
        observe_batches(
            model, batches(), observers, [GradientObserver(layer, metric) for layer in layers][: 2 * gradients]
        )
    with pytest.raises(error):
        layer_loss_rise(model, layers, batches(), 1.0)
    handle.remove()
    assert_unchanged(model, before)
    assert model(**batches()[0]).logits.dtype == torch.bfloat16


def test_weights_may_change_between_calls(source):
    """As quantizers of a pass change them."""
    narrow, wide = opened(source, torch.bfloat16), opened(source, torch.float32)
    with torch.no_grad(), fast_compute_dtype(narrow):
        narrow(**batches()[0])
        for model in (narrow, wide):
            find_moe_layers(model)[0].mlps[3].down_proj.weight.mul_(2)
            model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 4)
        assert torch.equal(narrow(**batches()[0]).logits, wide(**batches()[0]).logits)
    assert narrow.model.norm.weight.dtype == torch.bfloat16


def test_a_disabled_head(source):
    """The toolkit replaces the head in its passes by a product without values."""
    model = opened(source, torch.bfloat16)
    with torch.no_grad(), fast_compute_dtype(model), disable_lm_head(model):
        assert model(**batches()[0]).logits.is_meta


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_passes_of_the_toolkit(source, tmp_path, place):
    """They trace the model first: with weights that have no values if these are on disk, and without always_call."""
    narrow, wide = opened(source, torch.bfloat16), opened(source, torch.float32)
    offload(narrow, place, tmp_path)
    before = state(narrow)
    ids_BS = batches()[0]["input_ids"]
    with fast_compute_dtype(narrow):
        parts = subgraphs(narrow, ids_BS)
        found = hidden_states(narrow, parts, ids_BS)
    assert torch.equal(found, hidden_states(wide, subgraphs(wide, ids_BS), ids_BS))
    assert_unchanged(narrow, before)
