"""Whole checkpoints: writes a pruned model with its manifest and card, and opens it again in transformers."""

import llmcompressor  # noqa: F401  # first: it imports our modifiers, which import the modules of this package
