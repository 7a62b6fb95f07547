"""The live model: finds its MoE layers, computes their experts together, slices them, and masks their routers."""

import llmcompressor  # noqa: F401  # first: it imports our modifiers, which import the modules of this package
