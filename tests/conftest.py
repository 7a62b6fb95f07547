import copy
import ctypes
import gc
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import processes

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if importlib.util.find_spec("llmcompressor"):
    # bitsandbytes, which the toolkit imports, otherwise imports torch's compiler: a fifth of the time of all imports
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# what is imported stays, and the collector would look through it again and again
gc.disable()


# files that take longest, in that order: begun last, one would leave a worker alone with it
LONGEST = [
    "serving/kernels/test_launch.py",
    "serving/test_server.py",
    "serving/test_ranks.py",
    "serving/test_mutations.py",
    "serving/test_engine.py",
    "serving/test_features.py",
    "serving/test_adapters.py",
    "serving/test_benchmark.py",
    "serving/kernels/test_machine_code.py",
    "modeling/test_memory.py",
    "modifiers/test_recommended.py",
    "faults/test_resume_jobs.py",
    "checkpoint/test_families.py",
    "modifiers/test_reconstruction_pass.py",
    "modifiers/test_layerwise_gptq.py",
    "examples/test_tutorial.py",
    "checkpoint/test_mutations.py",
    "checkpoint/test_pickling.py",
    "calibration/test_gradients.py",
    "cli/test_oneshot.py",
    "calibration/test_layerwise.py",
    "modifiers/test_recipe_files.py",
    "faults/test_kill.py",
    "checkpoint/test_round_trip.py",
    "recovery/test_finetune.py",
    "modifiers/test_composition.py",
    "checkpoint/test_four_bits.py",
    "modeling/test_peft_targets.py",
    "modeling/test_compute_dtype.py",
    "report/test_page_in_browser.py",
    "benchmarks/test_whole_job.py",
    "modifiers/test_strategies.py",
    "checkpoint/test_scheme_checks.py",
    "benchmarks/test_bench.py",
    "modifiers/test_quantizers_after_pruning.py",
    "checkpoint/test_outputs.py",
    "cli/test_plan.py",
    "modifiers/test_float32_passes.py",
    "checkpoint/test_copies.py",
    "modifiers/test_ranks.py",
    "checkpoint/test_loading.py",
    "modifiers/test_runs.py",
    "benchmarks/test_runs.py",
    "evaluation/test_task_names.py",
]
_TESTS = Path(__file__).parent


_source_lines = inspect.getsourcelines
_source_lines_of_class = cache(_source_lines)


def _source_lines_once(of: Any) -> Any:
    """Parse the file of a class once: the toolkit does it four times a run."""
    return _source_lines_of_class(of) if isinstance(of, type) else _source_lines(of)


# patch: tests-source-of-classes
inspect.getsourcelines = _source_lines_once


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {_TESTS / file: rank for rank, file in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


# constants of the C header malloc.h, and the sizes up to which glibc keeps freed memory
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT_MEMORY = {_M_MMAP_THRESHOLD: 2**25, _M_TRIM_THRESHOLD: 2**29, _M_TOP_PAD: 2**24}


def _keep_freed_memory() -> None:
    """Keep freed memory in the process, a sixth of the time of small runs; tests of memory start their own process."""
    with suppress(OSError, AttributeError):
        for parameter, size in _KEPT_MEMORY.items():
            ctypes.CDLL(None).mallopt(parameter, size)
    if (memory := sys.modules.get("moe_coverage_plugin.modeling.memory")) is not None:
        # otherwise pruning sets it to 128 KiB for all later tests, and each larger tensor costs a system call
        memory.INITIAL_THRESHOLD = _KEPT_MEMORY[_M_MMAP_THRESHOLD]


def _list_no_packages() -> None:
    """Keep lm-eval from running ``pip list`` for each evaluation, whose output is not used."""
    if "torch" in sys.modules and importlib.util.find_spec("lm_eval"):
        from torch.utils import collect_env

        # patch: tests-pip-list
        collect_env.get_pip_packages = lambda *_: ("pip", "")


def _leave_out_what_nobody_reads() -> None:
    """Keep transformers from writing configs as text, and from drawing values without memory."""
    if "transformers" in sys.modules:
        import transformers

        # it formats a config for each message that no level shows, and for each type that a field does not have
        # patch: tests-config-text
        transformers.PreTrainedConfig.__repr__ = object.__repr__
    if "llmcompressor" in sys.modules:
        import jinja2
        from transformers import initialization

        draw = initialization.normal_
        # patch: tests-meta-values
        initialization.normal_ = lambda tensor, *args, **kw: tensor if tensor.is_meta else draw(tensor, *args, **kw)
        # patch: tests-card-template
        jinja2.Template = cache(jinja2.Template)


def pytest_collection_finish() -> None:
    _keep_freed_memory()
    _list_no_packages()
    _leave_out_what_nobody_reads()
    gc.collect()
    gc.freeze()
    gc.enable()
    processes.start_server()


def pytest_unconfigure() -> None:
    processes.stop_server()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    import torch

    # the tensors are tiny, and sums must not depend on how many threads share them, nor fixtures of modules on order
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _conversions_of_modules():
    yield from restored_conversions()


@pytest.fixture(autouse=True)
def _conversions_of_tests():
    yield from restored_conversions()


def restored_conversions() -> Iterator[None]:
    """Restore what ``load_quantizable_moe()`` changes for a process: how transformers reads a family's experts."""
    before = sys.modules.get("transformers.conversion_mapping")
    cache = copy.copy(getattr(before, "_checkpoint_conversion_mapping_cache", None))
    registered = set(getattr(before, "USER_REGISTERED_MAPPINGS", ()))
    yield
    if (module := sys.modules.get("transformers.conversion_mapping")) is not None:
        module._checkpoint_conversion_mapping_cache = cache
        module.USER_REGISTERED_MAPPINGS.clear()
        module.USER_REGISTERED_MAPPINGS.update(registered)


@pytest.fixture
def log():
    """Messages logged during a test, each as ``LEVEL message``."""
    # not every environment that runs a part of these tests has it
    from loguru import logger

    messages: list[str] = []
    sink = logger.add(lambda message: messages.append(str(message).rstrip()), format="{level} {message}", level="INFO")
    yield messages
    logger.remove(sink)
