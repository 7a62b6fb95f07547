"""Names of layers that predict several tokens, in checkpoints of the families that have them."""

from __future__ import annotations

import pytest

from moe_coverage_plugin.files.mtp import is_mtp_name, mtp_layers, without_mtp

LAYERS = {"num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("mtp.fc.weight", {}, True),
        ("mtp.layers.0.mlp.experts.3.gate_proj.weight", LAYERS, True),
        ("model.mtp.layers.0.mlp.experts.gate_up_proj", LAYERS, True),
        ("model.mtp_layers.0.input_layernorm.weight", LAYERS, True),
        ("model.mtp_block.0.mlp.gate.weight", LAYERS, True),
        ("model.layers.3.eh_proj.weight", LAYERS | {"num_nextn_predict_layers": 1}, True),
        ("model.language_model.layers.3.eh_proj.weight", {"text_config": LAYERS | {"num_mtp_layers": 1}}, True),
        ("language_model.model.layers.3.eh_proj.weight", {"text_config": LAYERS | {"num_mtp_layers": 1}}, True),
        ("model.layers.2.mlp.gate.weight", LAYERS | {"num_nextn_predict_layers": 1}, False),
        ("model.layers.4.mlp.gate.weight", LAYERS | {"num_nextn_predict_layers": 1}, False),
        ("model.layers.3.mlp.gate.weight", LAYERS | {"num_nextn_predict_layers": 0}, False),
        ("model.layers.3.mlp.gate.weight", LAYERS, False),
        ("model.layers.3.mlp.gate.weight", {"num_nextn_predict_layers": 1, "num_hidden_layers": None}, False),
        ("vision_tower.encoder.layers.3.norm.weight", LAYERS | {"num_nextn_predict_layers": 1}, False),
        ("model.visual.layers.3.norm.weight", LAYERS | {"num_nextn_predict_layers": 1}, False),
        ("model.layers.0.smtp.weight", {}, False),
        ("model.layers." + "9" * 5000 + ".w", LAYERS | {"num_nextn_predict_layers": 1}, False),
    ],
)
def test_names(name, config, expected):
    """Field case 2.1: by a part of the name, or by a number after the layers of the model."""
    assert is_mtp_name(name, config) is expected


def test_a_config_without_them():
    """Field case 2.1: counts are zero wherever they are nested, and nothing else changes."""
    config = {
        "num_nextn_predict_layers": 1,
        "use_mtp": True,
        "mtp_layers_block_type": ["moe"],
        "text_config": {"mtp_num_hidden_layers": 2, "hidden_size": 8, "mtp_config": {"num_mtp_layers": 3}},
    }
    assert mtp_layers(config) == 3
    changed = without_mtp(config)
    assert mtp_layers(changed) == 0
    assert changed == {
        "num_nextn_predict_layers": 0,
        "use_mtp": False,
        "mtp_layers_block_type": ["moe"],
        "text_config": {"mtp_num_hidden_layers": 0, "hidden_size": 8, "mtp_config": {"num_mtp_layers": 0}},
    }
    assert mtp_layers({"num_mtp_layers": None, "other": {"num_mtp_layers": "2"}}) == 0
