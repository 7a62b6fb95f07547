"""The serving half: a vLLM plugin that loads and runs checkpoints whose experts have unequal widths.

vLLM calls :func:`register` in every process it starts, through the entry point group ``vllm.general_plugins``.
"""


def register() -> None:
    """Make vLLM claim checkpoints that carry our entry; may be called any number of times."""
    # Here and not above: vLLM's modules take seconds to import, and importing this package must cost nothing.
    from vllm.model_executor.layers.quantization import register_quantization_config

    from moe_coverage_plugin.manifest import CONFIG_KEY
    from moe_coverage_plugin.serving import compat
    from moe_coverage_plugin.serving.config import CoverageConfig, has_ragged_experts

    register_quantization_config(CONFIG_KEY)(CoverageConfig)
    compat.lift_expert_width_check(has_ragged_experts)
