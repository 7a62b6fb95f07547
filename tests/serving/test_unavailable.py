"""A release of vLLM that the serving half does not fit starts for other models and stops at ours with one message."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import vllm
from transformers import Qwen3MoeConfig
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.quantization import get_quantization_config

from moe_coverage_plugin import serving
from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError
from moe_coverage_plugin.serving import compat, unavailable
from moe_coverage_plugin.serving.config import CoverageConfig
from tests import processes
from tests.serving.test_config import quantization_config

pytestmark = pytest.mark.slow

# a name that this package imports and that a later release of vLLM might not have
PROGRAM = """
import builtins, json, logging, multiprocessing.process, sys
# as in a user's process that has imported nothing of this package
multiprocessing.process._parent_process = None
for name in [each for each in sys.modules if each.partition(".")[0] == "moe_coverage_plugin"]:
    del sys.modules[name]
from vllm import plugins
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
assert "moe_coverage" not in QUANTIZATION_METHODS
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry

import_module = builtins.__import__

def without_one_name(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    if importer == "moe_coverage_plugin.serving.config" and "RoutedExperts" in (fromlist or ()):
        raise ImportError(f"cannot import name 'RoutedExperts' from {name!r}")
    return import_module(name, globals, locals, fromlist, level)

builtins.__import__ = without_one_name
# a process for each model would only take time
registry._run_in_subprocess = lambda inspect_model: inspect_model()
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage()) if record.levelname == "WARNING" else None
logging.getLogger("vllm").addHandler(handler)
for _ in range(2):
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
results = []
for path in sys.argv[1:]:
    try:
        config = EngineArgs(model=path, skip_tokenizer_init=True, max_model_len=64).create_engine_config()
        results.append(config.model_config.quantization)
    except ValueError as error:
        results.append(str(error))
print(json.dumps([[message for message in messages if "moe-coverage" in message], results]))
"""


def checkpoint(directory: Path, quantization: dict[str, Any] | None) -> str:
    """A directory with the config of a small Qwen3-MoE."""
    config = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=3, dtype="float32").to_dict()
    directory.mkdir()
    entry = {} if quantization is None else {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config | entry))
    return str(directory)


@pytest.mark.engine
@pytest.mark.slow
def test_other_models_start(tmp_path: Path) -> None:
    """Field case 2-15: an import that fails stopped vLLM for every model."""
    ours = quantization_config()
    stock = {key: value for key, value in ours.items() if key != CONFIG_KEY}
    kinds = {"plain": None, "stock": stock, "ours": ours}
    paths = [checkpoint(tmp_path / name, quantization) for name, quantization in kinds.items()]
    done = processes.run("-c", PROGRAM, *paths)
    assert done.returncode == 0, done.stderr[-3000:]
    [warning], (plain, quantized, stopped) = json.loads(done.stdout.splitlines()[-1])
    versions = f"moe-coverage-plugin {version('moe-coverage-plugin')} does not work with vLLM {vllm.__version__}"
    assert versions.partition("+")[0] in warning
    assert "cannot import name 'RoutedExperts'" in warning
    assert re.search(r"install vllm[<>=\d.,]+ or a newer moe-coverage-plugin$", warning)
    assert (plain, quantized) == (None, "compressed-tensors")
    assert warning.partition("other models can. ")[2] in stopped


@pytest.fixture
def _registered_again() -> Iterator[None]:
    yield
    unavailable._warn_once.cache_clear()
    serving.register()
    assert get_quantization_config(CONFIG_KEY) is CoverageConfig


@pytest.mark.usefixtures("_registered_again")
@pytest.mark.parametrize("kind", [ImportError, AttributeError, TypeError, RuntimeError])
def test_any_error_stops_our_checkpoints_only(
    monkeypatch: pytest.MonkeyPatch, log: list[str], kind: type[Exception]
) -> None:
    def fail() -> None:
        raise kind("moved")

    with monkeypatch.context() as patched:
        patched.setattr(serving, "_register", fail)
        for _ in range(2):
            serving.register()
    warnings = [message for message in log if "does not work with vLLM" in message]
    assert len(warnings) == 1
    config = get_quantization_config(CONFIG_KEY)
    assert config.override_quantization_method({"quant_method": "fp8"}, None, hf_config=None) is None
    message = rf"does not work with vLLM .* \({kind.__name__}: moved\)"
    with pytest.raises(CoverageError, match=message):
        config.override_quantization_method(quantization_config(), None)
    with pytest.raises(CoverageError, match=message):
        config.from_config({})


def test_a_layer_that_is_described_otherwise_is_found_at_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by the first model whose layers vLLM describes."""
    monkeypatch.setattr(FusedMoEConfig, "__post_init__", lambda _: None)
    monkeypatch.delitem(FusedMoEConfig.__dataclass_fields__, "intermediate_size")
    with pytest.raises(AttributeError, match="FusedMoEConfig has no field intermediate_size"):
        compat.lift_expert_width_check(lambda _: True)


def test_an_argument_of_a_later_release_does_not_stop_other_models() -> None:
    assert CoverageConfig.override_quantization_method({"quant_method": "fp8"}, None, hf_config=None, added=1) is None


def imported_names() -> list[tuple[str, str]]:
    """Everything that the serving half imports from vLLM when it is registered, as modules and names."""
    package = Path(serving.__file__).parent
    found = set()
    for file in (*package.glob("*.py"), *(package / "kernels").glob("*.py")):
        tree = ast.parse(file.read_text())
        typing = {id(each) for node in ast.walk(tree) if is_type_checking(node) for each in ast.walk(node)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "vllm"
                and id(node) not in typing
            ):
                found |= {(str(node.module), alias.name) for alias in node.names}
    return sorted(found)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


EVERY_NAME = """
import builtins, json, sys
from moe_coverage_plugin import serving
serving.register()
from vllm.model_executor.layers.quantization import get_quantization_config
import_module = builtins.__import__
results = []
for module, missing in json.load(sys.stdin):
    for kind in (ImportError, AttributeError, TypeError):
        def moved(name, globals=None, locals=None, fromlist=(), level=0):
            if name == module and missing in (fromlist or ()):
                raise kind(f"{missing} has moved")
            return import_module(name, globals, locals, fromlist, level)
        for name in [each for each in sys.modules if each.startswith("moe_coverage_plugin.serving.")]:
            del sys.modules[name]
        builtins.__import__ = moved
        try:
            serving.register()
            error = None
        except BaseException as raised:
            error = repr(raised)
        finally:
            builtins.__import__ = import_module
        results.append([module, missing, kind.__name__, error, get_quantization_config("moe_coverage").__name__])
print(json.dumps(results))
"""


def test_every_import_may_fail() -> None:
    """Field case 2.15: whatever vLLM moved, and however the import fails, vLLM starts for other models."""
    names = imported_names()
    assert len(names) > 10
    done = processes.run("-c", EVERY_NAME, text=json.dumps(names))
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 3 * len(names)
    assert [result for result in results if result[3] is not None] == []
    # names that are imported in functions do not stop the registration, but the checkpoint that needs them
    assert {result[4] for result in results} == {"UnavailableConfig", "CoverageConfig"}
