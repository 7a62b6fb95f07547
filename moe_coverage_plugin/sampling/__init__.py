"""Calibration text that the model writes itself."""

from moe_coverage_plugin.options import SamplingOptions
from moe_coverage_plugin.sampling.run import Sampled, sample

__all__ = ["Sampled", "SamplingOptions", "sample"]
