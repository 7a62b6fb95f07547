"""The method as llm-compressor modifiers; importing this package registers them."""

from llmcompressor.modifiers import ModifierFactory

from moe_coverage_plugin.modeling.lazy_modules import unload_image_processors_before_patches
from moe_coverage_plugin.modeling.loaded_weights import record_loading
from moe_coverage_plugin.modifiers.alignment import AlignmentModifier
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.channel_pruning import ChannelPruningModifier
from moe_coverage_plugin.modifiers.coverage import CoverageModifier
from moe_coverage_plugin.modifiers.layerwise_gptq import LayerwiseGPTQModifier
from moe_coverage_plugin.modifiers.log_level import define_metric_level
from moe_coverage_plugin.modifiers.oneshot_run import accept_loaded_models
from moe_coverage_plugin.modifiers.recommended import recommended_recipe
from moe_coverage_plugin.modifiers.resumption import end_progress_with_runs

__all__ = [
    "AlignmentModifier",
    "AttributionModifier",
    "ChannelPruningModifier",
    "CoverageModifier",
    "LayerwiseGPTQModifier",
    "recommended_recipe",
]

accept_loaded_models()
define_metric_level()
end_progress_with_runs()
for _modifier in (
    AttributionModifier,
    CoverageModifier,
    AlignmentModifier,
    ChannelPruningModifier,
    LayerwiseGPTQModifier,
):
    ModifierFactory.register(_modifier.__name__, _modifier)

# so early because models are opened before a run
record_loading()
unload_image_processors_before_patches()
