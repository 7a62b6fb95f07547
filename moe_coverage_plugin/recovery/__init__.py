"""Wins back by fine-tuning what pruning cost: adapters on experts and routers, trained on text and merged back."""

from moe_coverage_plugin.options import RecoveryOptions
from moe_coverage_plugin.recovery.run import Recovered, finetune

__all__ = ["Recovered", "RecoveryOptions", "finetune"]
