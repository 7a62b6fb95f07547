"""The paper's settings, for tests of what the recommended defaults do not cover."""

from __future__ import annotations

from typing import Any

ATTRIBUTION: dict[str, Any] = {"channel_metric": "activation", "layer_noise": 1.0}
COVERAGE: dict[str, Any] = {"scope": "layers", "inter_layer": "coverage", "intra_layer": "coverage"}
ALIGNMENT: dict[str, Any] = {"strategy": "hamilton"}
PRUNING: dict[str, Any] = {"reconstruct": False}

# for random models, whose loss may fall when a layer fades, which would leave that layer nothing
EVEN_LAYERS: dict[str, Any] = COVERAGE | {"inter_layer": "uniform"}
