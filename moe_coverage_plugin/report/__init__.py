"""Pages and pictures of plans, pruned checkpoints and results. Reads tensors and files, decides nothing."""
