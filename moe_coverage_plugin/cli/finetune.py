"""``moe-coverage finetune``: options, and the call of :func:`moe_coverage_plugin.finetune`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

FINETUNE = """\
Reduce the loss of a pruned checkpoint by fine-tuning: train DoRA on the experts and a low-rank sum on the routers,
merge both, and write a checkpoint of the same widths.

Text is packed into windows of tokens. The result is in 16 bit, even if the checkpoint has quantized weights, which are
decompressed and frozen: quantize it again. The loss curve is written beside it as JSON lines and as a picture. An
interrupted run continues from its work folder if the same command is given again. For several GPUs, use torchrun or
accelerate launch; every GPU has a copy of the model and trains on its part of each step.
"""
FINETUNE_EXAMPLES = """\
examples:
  moe-coverage finetune pruned --text code.txt prose.jsonl --output recovered
  moe-coverage finetune pruned --text web.jsonl --evaluation wiki.txt --teacher original --output recovered
  torchrun --nproc-per-node 4 --no-python moe-coverage finetune pruned --text web.jsonl --output recovered
"""
GROUPS = {
    "adapters and loss": ("mode", "expert_rank", "router_rank", "scaling", "balance", "distill", "temperature"),
    "steps": (
        *("expert_lr", "router_lr", "warmup", "clip", "epochs", "steps"),
        *("batch_size", "accumulation", "sequence_length", "seed"),
    ),
    "loss curve and resuming": ("held_out", "evaluate_every", "save_every"),
    "memory": ("checkpointing", "dtype", "nf4"),
}


def add_finetune(command: ArgumentParser) -> None:
    """Add the options of the subcommand."""
    # here, because pydantic takes half a second to import
    from moe_coverage_plugin.cli.option_flags import add_flags
    from moe_coverage_plugin.options import RecoveryOptions

    command.add_argument("checkpoint", metavar="CHECKPOINT", help="directory of a pruned checkpoint")
    command.add_argument("--output", required=True, metavar="OUT", help="directory to write; must be new or empty")
    text = command.add_argument_group("text")
    text.add_argument(
        "--text",
        required=True,
        nargs="+",
        metavar="FILE",
        help="files to train on: text, JSON lines (.jsonl), Parquet or CSV",
    )
    text.add_argument("--evaluation", nargs="+", metavar="FILE", help="other files, for the held-out loss")
    text.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="column of the text in files with rows (default: %(default)s)",
    )
    text.add_argument("--tokenizer", metavar="DIR", help="directory of the tokenizer (default: CHECKPOINT)")
    text.add_argument("--teacher", metavar="DIR", help="directory of the unpruned model, to learn its logits")
    for title, names in GROUPS.items():
        add_flags(command.add_argument_group(title), RecoveryOptions, *names)
    command.add_argument(
        "--work", metavar="DIR", help="folder for the state of an interrupted run (default: OUT.work)"
    )


def run(arguments: Namespace) -> None:
    """Fine-tune, and print the held-out loss before and after.

    Raises:
        CoverageError: a mistake in the arguments, or a checkpoint or text that cannot be used.
    """
    from moe_coverage_plugin.cli.option_flags import from_flags
    from moe_coverage_plugin.options import RecoveryOptions

    options = from_flags(RecoveryOptions, arguments)
    # after the checks, because torch takes seconds to import
    from moe_coverage_plugin.recovery import finetune

    done = finetune(
        arguments.checkpoint,
        arguments.text,
        arguments.output,
        options,
        evaluation=arguments.evaluation,
        field=arguments.text_field,
        teacher=arguments.teacher,
        tokenizer=arguments.tokenizer,
        work=arguments.work,
    )
    if done.writes:
        print(f"Held-out loss {done.before:.4f}, after {done.steps} steps {done.after:.4f} nats per token")
        print(f"Wrote {arguments.output}")
