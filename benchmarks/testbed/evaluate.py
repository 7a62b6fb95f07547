"""Measures the held-out loss of the mini-MoE, a unigram and a bigram model per kind of text, and the use of experts.

    python evaluate.py --work build/testbed

The unigram and bigram models are counted on the same training tokens and predict the same held-out tokens. Writes
`evaluation.json` into the folder of this script and prints Markdown tables.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

HERE = Path(__file__).resolve().parent
WINDOW = 512
MAX_WINDOWS_PER_KIND = 128
BATCH_WINDOWS = 16
DISCOUNT = 0.75


class CountModels:
    """Unigram with add-one smoothing, and bigram with absolute discounting interpolated with that unigram."""

    def __init__(self, tokens_N: np.ndarray, vocab_size: int):
        pairs = tokens_N[:-1].astype(np.int64) * vocab_size + tokens_N[1:]
        counts_VV = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
        unigram_V = np.bincount(tokens_N, minlength=vocab_size) + 1.0
        self.unigram_V = unigram_V / unigram_V.sum()
        seen_V = np.maximum(counts_VV.sum(axis=1), 1)[:, None]
        # an unseen context has no counts, so all its probability is that of the unigram
        discounted_VV = np.maximum(counts_VV - DISCOUNT, 0) / seen_V
        self.bigram_VV = discounted_VV + (1 - discounted_VV.sum(axis=1, keepdims=True)) * self.unigram_V

    def losses(self, windows_BS: np.ndarray) -> tuple[float, float]:
        """Return the mean losses in nats of unigram and bigram, without the first token of each window."""
        previous, following = windows_BS[:, :-1], windows_BS[:, 1:]
        return (
            float(-np.log(self.unigram_V[following]).mean()),
            float(-np.log(self.bigram_VV[previous, following]).mean()),
        )


@torch.no_grad()
def model_loss(model: PreTrainedModel, windows_BS: np.ndarray, chosen_LE: torch.Tensor) -> float:
    """Return the mean next-token loss in nats inside the windows; add the counts of picked experts to `chosen_LE`."""
    total, count = 0.0, 0
    for tokens in torch.from_numpy(windows_BS.astype(np.int64)).to(model.device).split(BATCH_WINDOWS):
        output = model(tokens, use_cache=False, output_router_logits=True)
        targets = tokens[:, 1:].flatten()
        total += F.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum").item()
        count += len(targets)
        for chosen_E, logits_TE in zip(chosen_LE, output.router_logits, strict=True):
            experts = logits_TE.topk(model.config.num_experts_per_tok, dim=-1).indices.flatten()
            chosen_E += experts.bincount(minlength=len(chosen_E))
    return total / count


def windows(tokens_N: np.ndarray) -> np.ndarray:
    """Return evenly spread windows [at most MAX_WINDOWS_PER_KIND, WINDOW] of a sequence of tokens."""
    grid = tokens_N[: len(tokens_N) // WINDOW * WINDOW].reshape(-1, WINDOW)
    picked = np.linspace(0, len(grid) - 1, min(len(grid), MAX_WINDOWS_PER_KIND)).round().astype(int)
    return grid[picked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="working folder with tokens.npz")
    parser.add_argument("--model", type=Path, default=HERE / "mini_moe")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(arguments.device)
    with np.load(arguments.work / "tokens.npz") as stored:
        counts = CountModels(stored["train"], model.config.vocab_size)
        held_out = {name.removeprefix("held_out."): stored[name] for name in stored.files if name != "train"}

    chosen_LE = torch.zeros(
        model.config.num_hidden_layers, model.config.num_experts, dtype=torch.int64, device=model.device
    )
    by_kind = {}
    for kind, tokens_N in tqdm(held_out.items(), unit="kind"):
        windows_BS = windows(tokens_N)
        unigram, bigram = counts.losses(windows_BS)
        by_kind[kind] = {
            "tokens": windows_BS.size,
            "unigram": round(unigram, 4),
            "bigram": round(bigram, 4),
            "model": round(model_loss(model, windows_BS, chosen_LE), 4),
        }
    mean = {
        name: round(sum(row[name] for row in by_kind.values()) / len(by_kind), 4)
        for name in ("unigram", "bigram", "model")
    }
    share_LE = (chosen_LE / chosen_LE.sum(dim=1, keepdim=True)).cpu()
    result = {
        "window": WINDOW,
        "loss_in_nats": by_kind,
        "mean_over_kinds": mean,
        "expert_share_of_choices": [[round(share, 4) for share in layer] for layer in share_LE.tolist()],
    }
    (HERE / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    print("| held-out text | tokens | unigram | bigram | mini-MoE | perplexity: bigram | mini-MoE |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for kind, row in [*by_kind.items(), ("mean over kinds", {"tokens": "", **mean})]:
        perplexities = f"{math.exp(row['bigram']):.1f} | {math.exp(row['model']):.2f}"
        print(
            f"| {kind} | {row['tokens']} | {row['unigram']:.3f} | {row['bigram']:.3f} | {row['model']:.3f} "
            f"| {perplexities} |"
        )
    print("\n| layer | share of an expert: smallest | median | largest |\n| --- | ---: | ---: | ---: |")
    for layer, share_E in enumerate(share_LE):
        print(f"| {layer} | {share_E.min():.1%} | {share_E.median():.1%} | {share_E.max():.1%} |")


if __name__ == "__main__":
    main()
