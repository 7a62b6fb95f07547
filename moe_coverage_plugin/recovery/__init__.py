"""Fine-tuning of pruned checkpoints: trains adapters on experts and routers on text, and merges them."""

from moe_coverage_plugin.options import RecoveryOptions
from moe_coverage_plugin.recovery.record import Recovered
from moe_coverage_plugin.recovery.run import finetune

__all__ = ["Recovered", "RecoveryOptions", "finetune"]
