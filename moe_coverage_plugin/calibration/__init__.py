import llmcompressor  # noqa: F401  # first: it has our modifiers imported, which need the modules here whole
