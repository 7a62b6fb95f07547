"""The serving half: a vLLM plugin that loads and runs checkpoints whose experts have unequal widths.

vLLM calls :func:`register` in every process that it starts, through the entry point group ``vllm.general_plugins``.
"""


def register() -> None:
    """Make vLLM claim checkpoints that have our entry; may be called any number of times.

    If a release of vLLM has changed so much that the serving half cannot be imported, other models still start, with
    one warning, and checkpoints with our entry stop with a clear error.
    """
    try:
        _register()
    # of any kind: an error that leaves this function stops vLLM for all models
    except Exception as error:
        from moe_coverage_plugin.serving.unavailable import register_unavailable

        register_unavailable(error)


def _register() -> None:
    # not at the top: importing vLLM takes seconds, and importing this package must cost nothing
    from vllm.model_executor.layers.quantization import register_quantization_config

    from moe_coverage_plugin.manifest import CONFIG_KEY
    from moe_coverage_plugin.serving import compat
    from moe_coverage_plugin.serving.config import CoverageConfig, check_unquantized, has_ragged_experts

    compat.check_model_config(check_unquantized)
    compat.lift_expert_width_check(has_ragged_experts)
    register_quantization_config(CONFIG_KEY)(CoverageConfig)
