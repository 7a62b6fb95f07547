"""Measures checkpoints on tasks of lm-eval, by transformers or by vLLM, and compares what was measured.

Importing this needs neither half: with vLLM it runs where llm-compressor is not.
"""

from moe_coverage_plugin.evaluation.comparison import compare
from moe_coverage_plugin.evaluation.local_tasks import LocalTask
from moe_coverage_plugin.evaluation.results import Results
from moe_coverage_plugin.evaluation.run import evaluate
from moe_coverage_plugin.options import EvaluationOptions

__all__ = ["EvaluationOptions", "LocalTask", "Results", "compare", "evaluate"]
