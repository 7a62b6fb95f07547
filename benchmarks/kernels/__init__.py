"""Times our layer with experts of unequal width and vLLM's fused MoE on a GPU."""
