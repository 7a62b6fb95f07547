r"""Counts what each rank of expert parallelism holds and computes, for a calibrated checkpoint and a text.

The checkpoint is served with ``--enable-expert-parallel`` over ``--tensor-parallel-size`` ranks, without graphs, whose
replays cannot be counted. Every rank reports its bytes of experts, and the tokens that were routed to each expert. The
busiest rank is compared with the mean, beside what calibration tokens predict, and beside vLLM's own placement for the
same tokens, which assigns equal numbers of experts in their order. With ``--data-parallel-size``, there are as many
engines, each with a part of the text, and every engine computes its experts for the tokens of all.

    python -m benchmarks.serving.expert_ranks CHECKPOINT --text TEXT --output out/expert_ranks.json
    python -m benchmarks.serving.expert_ranks CHECKPOINT --text TEXT --output out/dp2.json --data-parallel-size 2 \
        --tensor-parallel-size 1
    python -m benchmarks.serving.expert_ranks --render out/expert_ranks.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import portable
from moe_coverage_plugin.expert_placement import LayerLoads, contiguous, work_ratio
from moe_coverage_plugin.manifest import CoverageError, Manifest

# per rank, by name of each layer's experts: channels that the rank holds of every expert, and tokens routed to it
RankCounts = dict[str, dict[str, list[int]]]

# where an engine writes what its ranks counted, if it is one of several
FOLDER = "EXPERT_RANKS_FOLDER"
TIMEOUT_S = 600


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.render:
        # imported here because environments with vLLM need not have tabulate
        from benchmarks.markers import RESULTS
        from benchmarks.serving.render import write_expert_ranks

        write_expert_ranks(args.render, RESULTS)
        return
    if args.checkpoint is None or args.text is None or args.output is None:
        parser.error("a run needs CHECKPOINT, --text and --output")
    if FOLDER in os.environ:
        _one_of_engines(args)
        return
    try:
        record = measure(args)
    except CoverageError as error:
        parser.error(str(error))
    args.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["ratios"], indent=1))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the checkpoint over several ranks, and return what each of them held and computed."""
    manifest = Manifest.from_checkpoint(args.checkpoint)
    if manifest is None or manifest.layout != "ragged":
        raise CoverageError(
            f"{args.checkpoint} has no experts of unequal width: compress a model with layout='ragged'"
        )
    if manifest.tokens.keys() != manifest.widths.keys():
        raise CoverageError(f"{args.checkpoint} lacks calibration tokens: compress the model with this release")
    windows = _windows(args.checkpoint, args.text, args.windows, args.length)
    counts, held = _of_engines(args) if args.data_parallel_size > 1 else served(args, windows)
    # imported here because it imports torch, which the engines of other processes need first
    from benchmarks.serving.variant import environment

    return {
        "command": portable("benchmarks.serving.expert_ranks", sys.argv[1:], {"--output"}),
        "seed": args.seed,
        "environment": environment(),
        "checkpoint": description(manifest),
        "ranks": args.tensor_parallel_size * args.data_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "tokens": sum(map(len, windows)),
        "by_rank": by_rank(counts, held),
        "ratios": ratios(counts, manifest),
    }


def served(args: argparse.Namespace, windows: Sequence[Sequence[int]]) -> tuple[list[RankCounts], list[int]]:
    """Serve the windows by one engine, and return what each of its ranks counted, and the bytes of its experts."""
    # vLLM needs this to send functions to the engine's processes
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM, SamplingParams

    from benchmarks.serving import parameters

    llm = LLM(
        str(args.checkpoint),
        tensor_parallel_size=args.tensor_parallel_size,
        enable_expert_parallel=True,
        enforce_eager=True,
        max_model_len=args.length + 1,
        gpu_memory_utilization=args.gpu_memory_utilization,
        seed=args.seed,
    )
    llm.apply_model(parameters.count_tokens)
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    # an engine that is done computes for the others, so all begin and end together
    wait_for_engines("counting")
    llm.generate([{"prompt_token_ids": list(ids)} for ids in windows], sampling, use_tqdm=False)
    wait_for_engines("generated")
    return llm.apply_model(parameters.counted_tokens), llm.apply_model(parameters.expert_bytes)


def data_parallel_environments(size: int) -> list[dict[str, str]]:
    """Return the variables that make a process of vLLM one of several data-parallel engines, for each of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"VLLM_DP_SIZE": str(size), "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
    return [shared | {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)} for rank in range(size)]


def _of_engines(args: argparse.Namespace) -> tuple[list[RankCounts], list[int]]:
    """Serve by several data-parallel engines, each in a process of its own, which runs this command."""
    command = [sys.executable, "-m", "benchmarks.serving.expert_ranks", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        engines = [
            subprocess.Popen(command, env=os.environ | environment | {FOLDER: folder})
            for environment in data_parallel_environments(args.data_parallel_size)
        ]
        if not all_succeed(engines):
            raise CoverageError("an engine failed: see its messages above")
        parts = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(args.data_parallel_size)]
    return [each for counts, _ in parts for each in counts], [each for _, held in parts for each in held]


def all_succeed(engines: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Wait for all; if one fails, the others, which wait for it, are ended."""
    while None in (statuses := [engine.poll() for engine in engines]) and not any(statuses):
        time.sleep(0.1)
    for engine in engines:
        engine.terminate()
        engine.wait()
    return not any(statuses)


def _one_of_engines(args: argparse.Namespace) -> None:
    """Serve the part of this engine, and write what its ranks counted."""
    rank = int(os.environ["VLLM_DP_RANK"])
    windows = _windows(args.checkpoint, args.text, args.windows, args.length)[rank :: args.data_parallel_size]
    (Path(os.environ[FOLDER]) / f"{rank}.json").write_text(json.dumps(served(args, windows)))


def wait_for_engines(event: str) -> None:
    """Wait until all data-parallel engines have come this far."""
    if FOLDER not in os.environ:
        return
    folder, deadline = Path(os.environ[FOLDER]), time.monotonic() + TIMEOUT_S
    (folder / f"{os.environ['VLLM_DP_RANK']}.{event}").touch()
    while len(list(folder.glob(f"*.{event}"))) < int(os.environ["VLLM_DP_SIZE"]):
        if time.monotonic() > deadline:
            raise CoverageError(f"another engine has not come to {event!r} within {TIMEOUT_S} s")
        time.sleep(0.01)


def description(manifest: Manifest) -> str:
    """Return the model of a checkpoint, and what is kept of it."""
    widths = [width for widths_E in manifest.widths.values() for width in widths_E]
    kept = sum(widths) / len(widths) / manifest.intermediate_size
    model = Path(manifest.provenance.get("model", "unknown model")).name
    return f"{model}, {kept:.1%} of the expert channels in blocks of {manifest.block_size}"


def by_rank(counts: Sequence[RankCounts], held: Sequence[int]) -> list[dict[str, int]]:
    """Return bytes, experts, routed tokens and channels times tokens of each rank, summed over layers."""
    rows = []
    for layers, stored in zip(counts, held, strict=True):
        pairs = [pair for each in layers.values() for pair in zip(each["widths"], each["tokens"], strict=True)]
        rows.append(
            {
                "bytes of experts": stored,
                "experts": sum(width > 0 for width, _ in pairs),
                "routed tokens": sum(tokens for width, tokens in pairs if width),
                "channels times tokens": sum(width * tokens for width, tokens in pairs),
            }
        )
    return rows


def ratios(counts: Sequence[RankCounts], manifest: Manifest) -> dict[str, dict[str, float]]:
    """Return the load of the busiest rank of each layer, summed over layers, relative to that of the mean rank.

    Args:
        counts: of every rank. All of them route all tokens, so they have counted the same.
        manifest: of the checkpoint.

    Returns:
        For ``tokens`` and for ``work``, which is channels times tokens: ``counted``, ``expected`` of the calibration
        tokens, and ``by_number``, counted for vLLM's own placement.
    """
    ranks, names = len(counts), list(counts[0])
    routed = {name: counts[0][name]["tokens"] for name in names}
    assert all(each[name]["tokens"] == routed[name] for each in counts for name in names), "ranks route differently"
    holders = [_holders([each[name]["widths"] for each in counts], manifest.widths[name]) for name in names]
    by_number = [contiguous(len(manifest.widths[name]), ranks) for name in names]
    found = {}
    for load in ("tokens", "work"):
        counted, expected = (
            [_loads(manifest.widths[name], tokens[name], load == "work") for name in names]
            for tokens in (routed, manifest.tokens)
        )
        found[load] = {
            "counted": work_ratio(counted, holders, ranks),
            "expected": work_ratio(expected, holders, ranks),
            "by_number": work_ratio(counted, by_number, ranks),
        }
    return found


def _loads(widths_E: Sequence[int], tokens_E: Sequence[int], by_width: bool) -> LayerLoads:
    pairs = zip(widths_E, tokens_E, strict=True)
    return LayerLoads(tuple(widths_E), tuple(width * tokens if by_width else tokens for width, tokens in pairs))


def _holders(widths_RE: Sequence[Sequence[int]], widths_E: Sequence[int]) -> list[int]:
    """Return the rank that holds each expert; of removed ones, to which nothing is routed, the first rank."""
    holders_E = []
    for width, column_R in zip(widths_E, zip(*widths_RE, strict=True), strict=True):
        assert sorted(column_R) == [*[0] * (len(column_R) - 1), width], "not every expert is on one rank, entire"
        holders_E.append(column_R.index(width))
    return holders_E


def _windows(checkpoint: Path, text: Path, count: int, length: int) -> list[list[int]]:
    """Return token ids of ``count`` parts of a text, evenly spread over it, without overlap."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(checkpoint)(text.read_text(encoding="utf-8"))["input_ids"]
    whole = len(ids) // length
    if whole < count:
        raise CoverageError(
            f"{text} has {whole} windows of {length} tokens, --windows is {count}: give a longer text or fewer windows"
        )
    starts = (whole * number // count * length for number in range(count))
    return [ids[start : start + length] for start in starts]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="directory of a checkpoint with ragged experts")
    parser.add_argument("--text", type=Path, help="text to route, in UTF-8")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--tensor-parallel-size", type=int, default=2, help="number of ranks of an engine")
    parser.add_argument("--data-parallel-size", type=int, default=1, help="number of engines")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--seed", type=int, default=0, help="option of vLLM; nothing here is random")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--render", type=Path, nargs="+", metavar="FILE", help="measure nothing, write RESULTS.md")
    return parser


if __name__ == "__main__":
    main()
