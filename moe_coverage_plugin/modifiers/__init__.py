"""The method as llm-compressor modifiers; importing this package registers them."""

from llmcompressor.modifiers import ModifierFactory

from moe_coverage_plugin.modifiers.alignment import AlignmentModifier
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.channel_pruning import ChannelPruningModifier
from moe_coverage_plugin.modifiers.coverage import CoverageModifier

__all__ = ["AlignmentModifier", "AttributionModifier", "ChannelPruningModifier", "CoverageModifier"]

for _name in __all__:
    ModifierFactory.register(_name, globals()[_name])
