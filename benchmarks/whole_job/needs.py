"""Computes what a job needs: GPU memory, host memory, disk, and time relative to another model.

The page docs/scaling.md has these tables, and a test compares it with them. All sizes are bytes of one process that
computes in 16 bit. Symbols: ``P`` parameters, ``L`` layers with experts, ``D`` decoder layers, ``E`` experts of a
layer, ``K`` experts per token, ``H`` hidden size, ``I`` channels of an expert, ``V`` vocabulary, ``T`` calibration
tokens, ``B`` tokens of a batch, ``A`` inputs of the widest linear layer outside of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate

from benchmarks.whole_job.shapes import Config, Shape, experts_of, moe_layers_of
from moe_coverage_plugin.calibration.interactions import SCORED, matrix_bytes
from moe_coverage_plugin.calibration.layer_inputs import EXPERTS
from moe_coverage_plugin.calibration.layerwise_gradients import MOST_STATES
from moe_coverage_plugin.calibration.next_token import CHUNK_POSITIONS
from moe_coverage_plugin.core.reconstruction import RIDGES
from moe_coverage_plugin.modifiers.reconstruction_pass import REFIT_BYTES, REFITTED

TOKENS, BATCH_TOKENS = 512 * 2048, 8 * 2048
SPARSITY, GROUP = 0.25, 128
# H100 with 80 GB: seconds per token of Qwen3-30B-A3B, benchmarks/calibration.json
FORWARD_SECONDS, GRADIENT_SECONDS = 13.797 / 196608, 31.953 / 196608


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model.

    Attributes:
        total: of all layers.
        experts: of experts, without shared ones.
        active: those that compute a token, without embedding and head.
        quantized: of linear layers outside of experts, without head and routers.
        widest_input: inputs of the widest linear layer that is quantized, outside of experts.
    """

    total: int
    experts: int
    active: int
    quantized: int
    widest_input: int


def parameters(config: Config) -> Parameters:
    """Count parameters; multi-token prediction layers are not counted."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    width, count, with_experts = config["moe_intermediate_size"], experts_of(config), moe_layers_of(config)
    dense, shared = layers - with_experts, config.get("n_shared_experts", 0) * width
    if rank := config.get("kv_lora_rank"):
        rope, nope, value = (config[f"{name}_head_dim"] for name in ("qk_rope", "qk_nope", "v"))
        compressed = config["q_lora_rank"]
        query = heads * (rope + nope)
        attention = compressed * (hidden + query) if compressed else hidden * query
        attention += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        norms, output = rank + (compressed or 0), heads * value
    else:
        head = config["head_dim"]
        attention = hidden * head * 2 * (heads + config["num_key_value_heads"])
        norms, output = 2 * head, heads * head
    others = layers * attention + 3 * hidden * (with_experts * shared + dense * config["intermediate_size"])
    routers, expert = with_experts * count * hidden, 3 * hidden * width
    small = layers * (norms + 2 * hidden) + hidden + routers
    experts = with_experts * count * expert
    active = others + small + with_experts * config["num_experts_per_tok"] * expert
    widest = max(hidden, output, shared, config["intermediate_size"] if dense else 0)
    total = experts + others + small + 2 * hidden * config["vocab_size"]
    return Parameters(total, experts, active, others, widest)


def checkpoint_bytes(config: Config) -> float:
    """``2 P``."""
    return 2 * parameters(config).total


def compressed_bytes(config: Config, sparsity: float = SPARSITY) -> float:
    """Weights of W4A16 in half a byte and a 16-bit scale for each group of 128; the rest in 16 bit."""
    count = parameters(config)
    quantized = (1 - sparsity) * count.experts + count.quantized
    return quantized * (0.5 + 2 / GROUP) + 2 * (count.total - count.experts - count.quantized)


def hidden_state_bytes(config: Config, tokens: int = TOKENS) -> float:
    """Before a layer, and the inputs of its experts with their routing: ``T (2 * 2 H + 52 K)``.

    Of routing, each slot has five indices and two weights while it is sorted, and one more copy of the indices.
    """
    return tokens * (2 * 2 * config["hidden_size"] + 52 * config["num_experts_per_tok"])


def gradient_pass_bytes(config: Config, batch_tokens: int = BATCH_TOKENS) -> dict[str, float]:
    """Terms of the pass with gradients, beside the weights."""
    hidden, width, rows = config["hidden_size"], config["moe_intermediate_size"], config["num_experts_per_tok"]
    return {
        "curvature of the layers, 4 L H^2": 4 * moe_layers_of(config) * hidden**2,
        "inputs of the decoder layers, 2 D B H": 2 * config["num_hidden_layers"] * batch_tokens * hidden,
        "logits and their gradient, 4 B V": 4 * batch_tokens * config["vocab_size"],
        "probabilities of a chunk of tokens, 8 * 2048 V": 8 * CHUNK_POSITIONS * config["vocab_size"],
        "stacked weights of a layer's experts, 6 E H I": 6 * experts_of(config) * hidden * width,
        "values inside experts, 2 B K (3 H + 6 I)": 2 * batch_tokens * rows * (3 * hidden + 6 * width),
    }


def interaction_bytes(config: Config) -> float:
    """Matrices of the experts that are scored together, ``56 * 64 I^2``."""
    return min(SCORED, experts_of(config)) * matrix_bytes(config["moe_intermediate_size"])


def fit_bytes(config: Config) -> float:
    """Matrices of the experts that are fitted together: Gram matrices, and three in float64 for each of 7 ridges."""
    matrices = 8 + 3 * 8 * len(RIDGES[:-1])
    return matrices * min(EXPERTS, experts_of(config)) * config["moe_intermediate_size"] ** 2


def factor_bytes(config: Config) -> float:
    """Factors of the experts that are refitted, with copies while they are inverted, ``8 * 16 (H^2 + 4 I^2)``."""
    return REFITTED * 16 * (config["hidden_size"] ** 2 + 4 * config["moe_intermediate_size"] ** 2)


def hessian_bytes(config: Config) -> float:
    """Hessian matrices and weights of the experts that are quantized together, ``32 (16 H^2 + 4 I^2 + 20 H I)``.

    An expert has one matrix in 32 bit for each of its inputs. ``gate_proj`` and ``up_proj`` are stacked, and the
    toolkit makes three copies of their matrix while it reorders channels, and two of their weights; it takes fewer at
    once if less memory is free.
    """
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    return min(EXPERTS, experts_of(config)) * (16 * hidden**2 + 4 * width**2 + 20 * hidden * width)


def other_hessian_bytes(config: Config) -> float:
    """Of the widest linear layer outside of experts, with the copies of GPTQ: ``16 A^2``."""
    return 16 * parameters(config).widest_input ** 2


def offloaded_bytes(config: Config) -> float:
    """Weights on the card if they are offloaded: those of a layer and of the next one, ``2 * 2 P / D``."""
    return 2 * checkpoint_bytes(config) / config["num_hidden_layers"]


def embedding_bytes(config: Config) -> float:
    """Embedding and head, ``4 V H``."""
    return 4 * config["vocab_size"] * config["hidden_size"]


def layer_input_bytes(config: Config, tokens: int = TOKENS) -> float:
    """Inputs of all decoder layers of a group of batches in host memory, ``2 D T H``, at most 32 GiB."""
    return min(MOST_STATES, 2 * config["num_hidden_layers"] * tokens * config["hidden_size"])


def moved_bytes(config: Config, loads: int, tokens: int = TOKENS) -> float:
    """What moves to the card if the model is offloaded: the weights, ``2 P``, in each load.

    Args:
        config: of the model.
        loads: how often a pass loads each layer, for a group of batches.
        tokens: of the calibration set.
    """
    groups = -(-2 * config["num_hidden_layers"] * tokens * config["hidden_size"] // MOST_STATES) if loads > 1 else 1
    return loads * groups * checkpoint_bytes(config)


@dataclass(frozen=True)
class Needs:
    """Bytes of a job; GPU memory is that of the phase that takes most.

    Attributes:
        weights: of the model in 16 bit.
        gradients: GPU memory of the pass with gradients, beside the weights.
        gradients_offloaded: the same if the model is offloaded: inputs of the decoder layers are in host memory,
            embedding and head on the card.
        layer_by_layer: GPU memory of the largest pass layer by layer, beside weights and hidden states.
        hidden: hidden states of the passes layer by layer.
        layer_inputs: of a group of batches, if the model is offloaded.
        offloaded: weights on the card if the model is offloaded.
        stored: the compressed checkpoint.
    """

    weights: float
    gradients: float
    gradients_offloaded: float
    layer_by_layer: float
    hidden: float
    layer_inputs: float
    offloaded: float
    stored: float

    @property
    def in_memory(self) -> float:
        """GPU memory with all weights and hidden states on the card."""
        return self.weights + max(self.gradients, self.layer_by_layer + self.hidden)

    @property
    def with_offloading(self) -> float:
        """GPU memory with weights and hidden states elsewhere."""
        return self.offloaded + max(self.gradients_offloaded, self.layer_by_layer)

    @property
    def host(self) -> float:
        """Host memory with weights and hidden states there."""
        return self.weights + max(self.hidden, self.layer_inputs)

    @property
    def disk(self) -> float:
        """Both checkpoints."""
        return self.weights + self.stored


def needs(config: Config, tokens: int = TOKENS, batch_tokens: int = BATCH_TOKENS) -> Needs:
    """Compute what the recommended recipe with W4A16 needs."""
    gradients = gradient_pass_bytes(config, batch_tokens)
    # the curvature is kept from the pass with gradients until channels are scored
    interactions = next(iter(gradients.values())) + interaction_bytes(config)
    return Needs(
        weights=checkpoint_bytes(config),
        gradients=sum(gradients.values()),
        gradients_offloaded=sum(each for name, each in gradients.items() if not name.startswith("inputs of"))
        + embedding_bytes(config),
        layer_by_layer=max(
            interactions,
            fit_bytes(config),
            factor_bytes(config) + REFIT_BYTES,
            hessian_bytes(config),
            other_hessian_bytes(config),
        ),
        hidden=hidden_state_bytes(config, tokens),
        layer_inputs=layer_input_bytes(config, tokens),
        offloaded=offloaded_bytes(config),
        stored=compressed_bytes(config),
    )


def minutes(config: Config, reference: Config, seconds: float, tokens: int = TOKENS) -> float:
    """Minutes of a pass that takes the reference ``seconds`` a token, in the ratio of the parameters per token."""
    return seconds * tokens * parameters(config).active / parameters(reference).active / 60


def table(shapes: dict[str, Shape], reference: Shape) -> str:
    """The page's table, a column for each shape, in GB of 10^9 bytes.

    Args:
        shapes: by name.
        reference: the shape whose passes were timed.
    """
    columns = {shape.title: _column(shape.config, reference.config) for shape in shapes.values()}
    names = list(next(iter(columns.values())))
    rows = [(name, *(column[name] for column in columns.values())) for name in names]
    aligned = ("left", *["right"] * len(columns))
    return tabulate(rows, ("computed", *columns), tablefmt="pipe", disable_numparse=True, colalign=aligned)


def _column(config: Config, reference: Config) -> dict[str, str]:
    need = needs(config)
    sizes: dict[str, float] = {
        "weights, `2 P`": need.weights,
        **{f"gradients: {_code(name)}": size for name, size in gradient_pass_bytes(config).items()},
        "interactions: matrices of 64 experts, `56 * 64 I^2`": interaction_bytes(config),
        "reconstruction: matrices of 32 experts, `176 * 32 I^2`": fit_bytes(config),
        "reconstruction: factors of 8 experts, `8 * 16 (H^2 + 4 I^2)`": factor_bytes(config),
        f"reconstruction: tokens of {REFITTED} experts, at most": REFIT_BYTES,
        "GPTQ: matrices of 32 experts, `32 (16 H^2 + 4 I^2 + 20 H I)`": hessian_bytes(config),
        "GPTQ: the widest other layer, `16 A^2`": other_hessian_bytes(config),
        "hidden states and routing, `T (4 H + 52 K)`": need.hidden,
        "offloaded: weights of two layers on the card, `4 P / D`": need.offloaded,
        "offloaded: embedding and head on the card, `4 V H`": embedding_bytes(config),
        "offloaded: inputs of the decoder layers in host memory, `2 D T H`, at most 34.4": need.layer_inputs,
        "**GPU memory**, all on the card": need.in_memory,
        "**GPU memory**, weights and hidden states in host memory": need.with_offloading,
        "**host memory** in the latter case": need.host,
        "**disk**: both checkpoints": need.disk,
        "of it the compressed checkpoint": need.stored,
    }
    moved = {
        "the pass with gradients, `4 P` for a group": moved_bytes(config, loads=2),
        "interactions, and again in reconstruction, `2 P`": moved_bytes(config, loads=1),
    }
    times = {"one forward pass (scores in closed form)": FORWARD_SECONDS, "the pass with gradients": GRADIENT_SECONDS}
    shown = {name: f"{size / 1e9:,.1f}" for name, size in sizes.items()}
    shown |= {f"offloaded: TB moved to the card in {name}": f"{size / 1e12:,.1f}" for name, size in moved.items()}
    return shown | {
        f"**minutes** of {name}, weights on cards": f"{minutes(config, reference, seconds):,.1f}"
        for name, seconds in times.items()
    }


def _code(term: str) -> str:
    name, formula = term.rsplit(", ", 1)
    return f"{name}, `{formula}`"
