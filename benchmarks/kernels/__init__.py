"""Our layer of ragged experts beside vLLM's fused MoE on a uniform layer of the same channels, on a GPU."""
