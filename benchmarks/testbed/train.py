"""Trains the mini-MoE, a Qwen3-MoE of 10.9 M parameters, on the token arrays of `tokens.py`.

    python train.py --work build/testbed

Takes minutes on a GPU and days on a CPU, unless `--epochs` or `--max-minutes` is lowered. The progress of the learning
rate schedule is the larger of two fractions, of tokens and of time, so that a run which `--max-minutes` ends has
completed its schedule. Writes the model, its tokenizer, `loss_curve.jsonl` and `training.json`.
"""

import argparse
import json
import math
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokens import CONTEXT_LENGTH, END_OF_DOCUMENT_ID, VOCAB_SIZE
from transformers import GenerationConfig, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).resolve().parent
LOG_EVERY = 50
VALIDATE_EVERY = 500
VALIDATION_WINDOWS_PER_KIND = 16
SECONDS_PER_MINUTE = 60


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of a run; `window` is in tokens, `batch_windows` in windows."""

    seed: int = 0
    epochs: float = 16.0
    batch_windows: int = 32
    window: int = CONTEXT_LENGTH
    learning_rate: float = 3e-3
    final_learning_rate_share: float = 0.02
    warmup_share: float = 0.02
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: float = 1.0
    router_aux_loss_coef: float = 0.01


def model_config(router_aux_loss_coef: float) -> Qwen3MoeConfig:
    """Return the architecture: each layer is an MoE layer, experts have six blocks of 64 channels."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        moe_intermediate_size=384,
        intermediate_size=384,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        max_position_embeddings=CONTEXT_LENGTH,
        router_aux_loss_coef=router_aux_loss_coef,
        bos_token_id=END_OF_DOCUMENT_ID,
        eos_token_id=END_OF_DOCUMENT_ID,
        pad_token_id=END_OF_DOCUMENT_ID,
    )


class MasterWeights:
    """Float32 copies of a model's parameters, which the optimizer updates; the model computes in `dtype`.

    Autocast does not support grouped matrix products, so the model's parameters are stored in `dtype`.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        self.working = list(model.parameters())
        self.parameters = [parameter.detach().float().clone() for parameter in self.working]
        for parameter in self.working:
            parameter.data = parameter.data.to(dtype)

    def groups(self, weight_decay: float) -> list[dict]:
        """Return parameter groups with weight decay for matrices and without it for norms."""
        matrices = [parameter for parameter in self.parameters if parameter.ndim > 1]
        gains = [parameter for parameter in self.parameters if parameter.ndim <= 1]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]

    def take_gradients(self) -> None:
        for master, working in zip(self.parameters, self.working, strict=True):
            master.grad = working.grad.float()
            working.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        torch._foreach_copy_(self.working, self.parameters)


def balance_loss(router_logits_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """Load-balancing loss of one layer (Switch Transformer, equations 4 to 6, for top-k); `top_k` if balanced.

    It is computed per layer and not over all layers together, so that every layer uses all of its experts.
    """
    experts = router_logits_TE.shape[-1]
    probabilities_TE = router_logits_TE.float().softmax(dim=-1)
    chosen_TK = probabilities_TE.topk(top_k, dim=-1).indices
    share_E = F.one_hot(chosen_TK, experts).sum(dim=1).float().mean(dim=0)
    return experts * (share_E * probabilities_TE.mean(dim=0)).sum()


def losses(model: PreTrainedModel, tokens_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean next-token loss in nats and mean load-balancing loss over the layers."""
    output = model.model(tokens_BS, use_cache=False, output_router_logits=True)
    logits_BSV = model.lm_head(output.last_hidden_state[:, :-1])
    nll = F.cross_entropy(logits_BSV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten())
    layers = [balance_loss(logits, model.config.num_experts_per_tok) for logits in output.router_logits]
    return nll, torch.stack(layers).mean()


def batches(tokens_N: torch.Tensor, window: int, batch_windows: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield int64 batches [batch_windows, window] without end; each epoch shifts the windows and shuffles them."""
    generator = torch.Generator().manual_seed(seed)
    within_S = torch.arange(window, device=tokens_N.device)
    while True:
        shift = int(torch.randint(window, (), generator=generator))
        starts = torch.randperm((len(tokens_N) - shift) // window, generator=generator) * window + shift
        for starts_B in starts.to(tokens_N.device).split(batch_windows):
            if len(starts_B) == batch_windows:
                yield tokens_N[starts_B[:, None] + within_S].long()


def learning_rate_share(progress: float, warmup_share: float, final_share: float) -> float:
    """Return the learning rate relative to its peak at a progress of 0 to 1: linear warm-up, then a cosine."""
    if progress < warmup_share:
        return progress / warmup_share
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - warmup_share) / (1 - warmup_share)))
    return final_share + (1 - final_share) * cosine


def leading_windows(tokens_N: np.ndarray, window: int) -> np.ndarray:
    """Return the first int64 windows [at most VALIDATION_WINDOWS_PER_KIND, window] of a token array."""
    count = min(VALIDATION_WINDOWS_PER_KIND, len(tokens_N) // window)
    return tokens_N[: count * window].reshape(count, window).astype(np.int64)


@torch.no_grad()
def validation_loss(model: PreTrainedModel, windows_by_kind: dict[str, torch.Tensor]) -> float:
    """Mean over the text kinds of the next-token loss on a few held-out windows."""
    per_kind = [losses(model, windows)[0].item() for windows in windows_by_kind.values()]
    return sum(per_kind) / len(per_kind)


def pick_device(name: str) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else torch.device(name)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def train(
    model: PreTrainedModel,
    arrays: dict[str, np.ndarray],
    parameters: Hyperparameters,
    max_seconds: float,
    curve_file: Path,
) -> dict:
    """Train the model in place until the number of tokens or the time is reached; return steps, tokens and time."""
    device = model.device
    masters = MasterWeights(model, torch.bfloat16 if device.type == "cuda" else torch.float32)
    optimizer = torch.optim.AdamW(
        masters.groups(parameters.weight_decay),
        lr=parameters.learning_rate,
        betas=parameters.betas,
        fused=True,
    )
    tokens_N = torch.from_numpy(arrays["train"].astype(np.int32)).to(device)
    validation = {
        name: torch.from_numpy(leading_windows(array, parameters.window)).to(device)
        for name, array in arrays.items()
        if name != "train"
    }
    tokens_per_step = parameters.batch_windows * parameters.window
    total_steps = max(1, round(parameters.epochs * len(tokens_N) / tokens_per_step))
    step_losses = torch.compile(losses) if device.type == "cuda" else losses
    stream = batches(tokens_N, parameters.window, parameters.batch_windows, parameters.seed)

    start = time.perf_counter()
    step, progress = 0, 0.0
    with open(curve_file, "w", encoding="utf-8") as curve:
        while progress < 1.0:
            share = learning_rate_share(progress, parameters.warmup_share, parameters.final_learning_rate_share)
            for group in optimizer.param_groups:
                group["lr"] = share * parameters.learning_rate
            nll, balance = step_losses(model, next(stream))
            (nll + parameters.router_aux_loss_coef * balance).backward()
            masters.take_gradients()
            norm = torch.nn.utils.clip_grad_norm_(masters.parameters, parameters.max_gradient_norm)
            optimizer.step()
            masters.publish()

            step += 1
            seconds = time.perf_counter() - start
            progress = max(step / total_steps, seconds / max_seconds)
            if step % LOG_EVERY == 0 or progress >= 1.0:
                entry = {
                    "step": step,
                    "tokens": step * tokens_per_step,
                    "seconds": round(seconds, 1),
                    "loss": round(nll.item(), 4),
                    "balance_loss": round(balance.item(), 4),
                    "gradient_norm": round(norm.item(), 3),
                    "learning_rate": round(share * parameters.learning_rate, 7),
                }
                if step % VALIDATE_EVERY == 0 or progress >= 1.0:
                    entry["held_out_loss"] = round(validation_loss(model, validation), 4)
                    print(json.dumps(entry), flush=True)
                curve.write(json.dumps(entry) + "\n")
    return {
        "steps": step,
        "tokens": step * tokens_per_step,
        "passes": round(step * tokens_per_step / len(tokens_N), 2),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(step * tokens_per_step / seconds),
    }


def save(model: PreTrainedModel, tokenizer_folder: Path, out: Path) -> None:
    """Write the weights in bfloat16 with one tensor per projection of each expert, and the tokenizer."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=END_OF_DOCUMENT_ID, eos_token_id=END_OF_DOCUMENT_ID, pad_token_id=END_OF_DOCUMENT_ID
    )
    model.save_pretrained(out)
    shutil.copytree(tokenizer_folder, out, dirs_exist_ok=True)


def main() -> None:
    defaults = Hyperparameters()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="working folder with tokens.npz and tokenizer/")
    parser.add_argument("--out", type=Path, default=HERE / "mini_moe", help="folder for the model and its records")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--max-minutes", type=float, default=math.inf)
    parser.add_argument("--epochs", type=float, default=defaults.epochs)
    parser.add_argument("--batch-windows", type=int, default=defaults.batch_windows)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = parser.parse_args()

    parameters = Hyperparameters(seed=arguments.seed, epochs=arguments.epochs, batch_windows=arguments.batch_windows)
    torch.manual_seed(parameters.seed)
    device = pick_device(arguments.device)
    model = Qwen3MoeForCausalLM(model_config(parameters.router_aux_loss_coef)).to(device)
    model.set_experts_implementation("grouped_mm")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with np.load(arguments.work / "tokens.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}

    run = train(
        model, arrays, parameters, arguments.max_minutes * SECONDS_PER_MINUTE, arguments.out / "loss_curve.jsonl"
    )
    save(model, arguments.work / "tokenizer", arguments.out)
    record = {
        "hyperparameters": asdict(parameters),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_tokens": len(arrays["train"]),
        "device": device_name(device),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **run,
    }
    (arguments.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
