"""Pictures and pages of a plan and of results. Reads tensors and files, decides nothing."""
