"""The live model: finding, grouping, slicing and masking its MoE layers, and the dtype in which it computes."""

import llmcompressor  # noqa: F401  # first: it imports our modifiers, which import the modules of this package
