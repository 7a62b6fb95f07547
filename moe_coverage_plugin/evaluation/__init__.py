"""Evaluation of checkpoints on tasks of lm-eval, by transformers or vLLM, and comparison of the results.

Importing this package imports neither llm-compressor nor vLLM, because they are in separate environments.
"""

from moe_coverage_plugin.evaluation.comparison import compare
from moe_coverage_plugin.evaluation.local_tasks import LocalTask
from moe_coverage_plugin.evaluation.results import Results
from moe_coverage_plugin.evaluation.run import evaluate
from moe_coverage_plugin.options import EvaluationOptions

__all__ = ["EvaluationOptions", "LocalTask", "Results", "compare", "evaluate"]
