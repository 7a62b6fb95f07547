"""Triton kernels for experts of unequal width; torch and Triton only."""

from moe_coverage_plugin.serving.kernels.compilation import compile_ahead
from moe_coverage_plugin.serving.kernels.operator import run_kernels
from moe_coverage_plugin.serving.kernels.weights import KernelWeights, prepare, refusal

__all__ = ["KernelWeights", "compile_ahead", "prepare", "refusal", "run_kernels"]
