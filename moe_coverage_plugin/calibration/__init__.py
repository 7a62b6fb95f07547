"""Observes a model on calibration data. Changes no weight and decides nothing."""

import llmcompressor  # noqa: F401  # first: it imports our modifiers, which import the modules of this package
