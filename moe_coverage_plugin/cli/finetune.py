"""``moe-coverage finetune``: its options, and the call of :func:`moe_coverage_plugin.finetune` that they describe."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from typing import Any

FINETUNE = """\
Win back by fine-tuning what pruning cost: train DoRA on the experts and a low-rank sum on the routers, merge both, and
write a checkpoint of the same widths.

Text is packed into windows of tokens. The result is in 16 bit, also where the checkpoint has quantized weights, which
are decompressed and stay frozen: quantize it again. Beside it lie the loss curve as JSON lines and as a picture. A run
that was interrupted goes on from its work folder when the same command is given again. Several GPUs: start it by
torchrun or accelerate launch; every one holds the whole model and trains on its part of each step.
"""
FINETUNE_EXAMPLES = """\
examples:
  moe-coverage finetune pruned --text code.txt prose.jsonl --output recovered
  moe-coverage finetune pruned --text web.jsonl --evaluation wiki.txt --teacher original --output recovered
  torchrun --nproc-per-node 4 --no-python moe-coverage finetune pruned --text web.jsonl --output recovered
"""

# as in RecoveryOptions, which lies beside code that imports torch; its defaults are repeated for the reader only
OPTIONS: dict[str, tuple[tuple[str, type, Any, str], ...]] = {
    "what is trained": (
        ("expert-rank", int, 32, "rank of DoRA on every projection of every expert"),
        ("router-rank", int, 4, "rank of what is added to routers"),
        ("scaling", float, 2.0, "factor of the low-rank products, lora_alpha / r"),
        ("balance", float, 0.0, "weight of the auxiliary loss that evens out the load of experts"),
        ("distill", float, 1.0, "with --teacher, share of the loss that is divergence from its logits"),
        ("temperature", float, 1.0, "divides both models' logits in that divergence"),
    ),
    "steps": (
        ("expert-lr", float, 1e-4, "peak learning rate of experts"),
        ("router-lr", float, 1e-6, "peak learning rate of routers"),
        ("warmup", float, 0.1, "fraction of the steps over which rates rise; they fall to zero afterwards"),
        ("clip", float, 0.5, "largest norm of the gradient"),
        ("epochs", float, 1.0, "times that the text is gone through"),
        ("steps", int, None, "steps of the optimizer instead of epochs"),
        ("batch-size", int, 8, "windows at a time on every GPU"),
        ("accumulation", int, 1, "such batches in a step"),
        ("sequence-length", int, 512, "tokens of a window"),
        ("seed", int, 0, "of the adapters' start and the order of the text"),
    ),
    "loss curve and resuming": (
        ("held-out", float, 0.05, "fraction of the windows to measure on, without --evaluation"),
        ("evaluate-every", int, 100, "steps between two points on held-out text"),
        ("save-every", int, 100, "steps between two states to resume from"),
    ),
}


def add_finetune(command: ArgumentParser) -> None:
    """Give the subcommand its options."""
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="directory of a pruned checkpoint")
    command.add_argument("--output", required=True, metavar="OUT", help="directory to write; must be new or empty")
    text = command.add_argument_group("text")
    text.add_argument(
        "--text", required=True, nargs="+", metavar="FILE", help="text files, or JSON lines (.jsonl), to train on"
    )
    text.add_argument("--evaluation", nargs="+", metavar="FILE", help="other files to measure the loss on")
    text.add_argument(
        "--text-field", default="text", metavar="NAME", help="what holds the text in JSON lines (default: text)"
    )
    text.add_argument("--tokenizer", metavar="DIR", help="where the tokenizer lies, if not in CHECKPOINT")
    text.add_argument("--teacher", metavar="DIR", help="the unpruned model, to learn from its logits")
    for title, options in OPTIONS.items():
        group = command.add_argument_group(title)
        if title == "what is trained":
            group.add_argument(
                "--mode",
                choices=("all", "router"),
                default=SUPPRESS,
                help="experts and routers, or routers alone, which needs --teacher (default: all)",
            )
        for name, kind, default, text_of in options:
            told = text_of if default is None else f"{text_of} (default: {default})"
            group.add_argument(f"--{name}", type=kind, default=SUPPRESS, metavar="N", help=told)
    memory = command.add_argument_group("memory")
    memory.add_argument(
        "--checkpointing",
        action="store_true",
        default=SUPPRESS,
        help="compute activations twice instead of keeping them",
    )
    memory.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default=SUPPRESS,
        help="of frozen weights and result (default: the checkpoint's)",
    )
    memory.add_argument(
        "--nf4",
        action="store_true",
        default=SUPPRESS,
        help="hold the frozen weights of experts in NF4 (bitsandbytes), which the result has rounded so; slower",
    )
    command.add_argument(
        "--work", metavar="DIR", help="folder for the state of an interrupted run (default: OUT.work)"
    )


def run(arguments: Namespace) -> None:
    """Fine-tune, and print what it brought."""
    from moe_coverage_plugin.recovery import RecoveryOptions, finetune

    given = {name: value for name, value in vars(arguments).items() if name in RecoveryOptions.model_fields}
    done = finetune(
        arguments.checkpoint,
        arguments.text,
        arguments.output,
        RecoveryOptions(**given),
        evaluation=arguments.evaluation,
        field=arguments.text_field,
        teacher=arguments.teacher,
        tokenizer=arguments.tokenizer,
        work=arguments.work,
    )
    if done.writes:
        print(f"Held-out loss {done.before:.4f}, after {done.steps} steps {done.after:.4f} nats per token")
        print(f"Wrote {arguments.output}")
