"""Every option of the package: names, choices, ranges and defaults.

Modifiers inherit from these classes, and the command line takes its choices, defaults and help from their fields.
pydantic and the standard library only.
"""

from moe_coverage_plugin.options.base import Options
from moe_coverage_plugin.options.evaluation import EvaluationOptions
from moe_coverage_plugin.options.pruning import (
    GRADIENT_METRICS,
    NLL_IMPORTANCES,
    AlignmentOptions,
    AlignmentStrategy,
    AttributionOptions,
    ChannelMetric,
    ChannelPruningOptions,
    CoverageOptions,
    ExpertImportance,
    ExpertPrior,
    InterLayer,
    IntraLayer,
    LayerPrior,
    RemainderRule,
    Scope,
    Smoothing,
    check_min_width,
)
from moe_coverage_plugin.options.recovery import RecoveryOptions
from moe_coverage_plugin.options.sampling import SamplingOptions

__all__ = [
    "GRADIENT_METRICS",
    "NLL_IMPORTANCES",
    "AlignmentOptions",
    "AlignmentStrategy",
    "AttributionOptions",
    "ChannelMetric",
    "ChannelPruningOptions",
    "CoverageOptions",
    "EvaluationOptions",
    "ExpertImportance",
    "ExpertPrior",
    "InterLayer",
    "IntraLayer",
    "LayerPrior",
    "Options",
    "RecoveryOptions",
    "RemainderRule",
    "SamplingOptions",
    "Scope",
    "Smoothing",
    "check_min_width",
]
