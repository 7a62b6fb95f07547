"""Writes a pruned model as a complete checkpoint, and opens checkpoints in transformers."""

import llmcompressor  # noqa: F401  # first: it imports our modifiers, which import the modules of this package
