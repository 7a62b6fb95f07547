"""Times our layer of experts of unequal width and vLLM's fused MoE on a GPU."""
