"""The Python function with paths of no model: an error before lm-eval is imported and without requests.

Field case 2.20: the hub was asked again and again, for half a minute.
"""

from __future__ import annotations

import pytest

from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.evaluation import backends, evaluate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("./none", "there is no such directory"),
        ("no/such/model", "there is no such directory"),
        ("file", "it is a file"),
        ("empty", "it has no config.json"),
        ("no/such", "the hub cannot be asked"),
    ],
)
def test_no_model(tmp_path, monkeypatch, name, reason):
    monkeypatch.setattr(backends, "check_lm_eval", lambda: pytest.fail("lm-eval was imported first"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CoverageError, match=f"{name} is not a model directory.*{reason}"):
        evaluate(name, ["piqa"], tmp_path / "results.json")
