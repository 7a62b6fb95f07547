"""Lists the settings of each table of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.allocation import recipes
from benchmarks.allocation.recipes import BLOCK, BLOCKS, HAMILTON, WIDE_BLOCKS, Recipe, Rounding, channels

ALL_CORPORA = "all"
# text that the model wrote itself: as many windows as of other texts; half of them; all of it
OWN, MIXED, OWN_ENTIRE = "own", "own and all", "own, entire"
WRITTEN = (OWN, MIXED, OWN_ENTIRE)
UNPRUNED = "unpruned"
RECOMMENDED = ("recommended", "recommended, no reconstruction")
SPARSITIES = (0.25, 0.5)
SWEEP_SPARSITIES = (0.15, 0.25, 0.35, 0.45, 0.5, 0.75)
SWEEP_BITS = (16, 8, 4)


@dataclass(frozen=True)
class Setting:
    """One row before it is measured.

    Attributes:
        table: key of the table, see :data:`TITLES`.
        name: label of the row; label, sparsity and bits are unique in a table.
        method: name of the method; rows of one method form a curve over bytes.
        sparsity: fraction to remove: of expert channels, or of the experts or weights that the method removes.
        recipe: how the model is pruned.
        bits: bits of a weight.
        rounding: how weights of fewer than 16 bits are rounded.
        corpus: name of the calibration text, ``all`` for equal parts of all texts, or one of :data:`WRITTEN`.
        top_k: key of :data:`TOP_K`, ``None`` if the top-k of the routers is unchanged.
    """

    table: str
    name: str
    method: str
    sparsity: float
    recipe: Recipe
    bits: int = 16
    rounding: Rounding = "nearest"
    corpus: str = ALL_CORPORA
    top_k: str | None = None

    @property
    def calibrated(self) -> bool:
        """Whether the row depends on the calibration windows, and so on the seed."""
        return self.recipe != Recipe() or self.rounding != "nearest"


# number of experts that a router picks for a token, computed from the number that the model was trained with
TOP_K: dict[str, Callable[[int], int]] = {
    "1": lambda _k: 1,
    "K/2": lambda k: max(1, k // 2),
    "K-1": lambda k: max(1, k - 1),
    "K": lambda k: k,
    "K+1": lambda k: k + 1,
    "K+2": lambda k: k + 2,
    "2K": lambda k: 2 * k,
}

METHODS: dict[str, Callable[[float], Recipe]] = {
    "uniform width": lambda p: channels(p, recipes.UNIFORM, HAMILTON),
    "paper": lambda p: channels(p, recipes.PAPER, HAMILTON),
    "paper, noise 0.1": lambda p: channels(p, recipes.PAPER, HAMILTON, noise=0.1),
    "paper inside layers": lambda p: channels(p, recipes.INSIDE_LAYERS, HAMILTON),
    "inside layers, exact ALA": lambda p: channels(p, recipes.INSIDE_LAYERS, HAMILTON, importance="second_order"),
    "one level, exact ALA": lambda p: channels(p, recipes.ONE_LEVEL, HAMILTON, importance="second_order"),
    "recommended": lambda p: recipes.recommended(p),
    "recommended, no reconstruction": lambda p: recipes.recommended(p, reconstruct=None),
    "fisher": lambda p: recipes.recommended(p, metric="fisher"),
    "fisher, no reconstruction": lambda p: recipes.recommended(p, metric="fisher", reconstruct=None),
    "REAP": recipes.reap,
    "least used experts of a layer": lambda _p: Recipe(drop_least_used="layer"),
    "least used experts of the model": lambda _p: Recipe(drop_least_used="model"),
    "Wanda": recipes.wanda,
}
SWEEP_METHODS = (*RECOMMENDED, "uniform width", "paper", "one level, exact ALA", "REAP", "Wanda")

TITLES = {
    "unpruned": ("The unpruned model", ""),
    "main": (
        "Methods at equal bytes",
        f"Channels in blocks of {BLOCK}. Methods that remove entire experts round their number down, so their bytes "
        "can be slightly larger. Wanda only sets weights to zero: its bytes are those of a dense file, and in "
        "brackets those of an ideal sparse file (nonzero weights, and a mask with one bit per weight), which no "
        "engine serves.",
    ),
    "strategies": (
        "Strategies between and inside layers",
        "Rise of the loss. Rows: strategies that set the budgets of layers, or one budget for all experts of the "
        "model (global). Columns: strategies that set the widths inside a budget; coverage with each prior. Channels "
        "by activation, exact widths.",
    ),
    "metrics": ("Channel metrics", "Exact widths."),
    "smoothing": ("Smoothing of importance", "Channels by activation, first order, exact widths."),
    "order": (
        "Expert importance: first against second order",
        "Both in closed form, compared with the end-to-end importances of a backward pass. Channels by activation, "
        "square root smoothing, exact widths.",
    ),
    "alignment": (
        "Alignment to blocks",
        "Largest remainders by channels (l-r-c) or by removed score (l-r-s), best blocks, and exact widths. Channels "
        "that do not fill a block are not used, so bytes differ slightly.",
    ),
    "min_width": (
        "Minimum width",
        f"Experts narrower than m are removed before widths are rounded to blocks of {BLOCK} (l-r-c).",
    ),
    "sweep": ("Sparsity and bits", f"Weights rounded to nearest, symmetric, in groups of {BLOCK}."),
    "corpora": (
        "Calibration corpora",
        "Every corpus alone, with the same number of windows. The first table is calibrated on equal parts of all.",
    ),
    "own": (
        "Text that the model writes itself",
        "Calibrated on that text, on all texts in equal parts, or on half of each; `own, entire` is all text that the "
        "command `moe-coverage sample` writes by default, which is what the recommended command calibrates on. Blocks "
        f"of {BLOCK}, and groups of {BLOCK} for 4 bits.",
    ),
    "topk": (
        "Experts picked for a token",
        "Routers of the unpruned model, and of the model pruned by the recommended recipe at 25 %, pick fewer or more "
        "experts for a token than in training (K).",
    ),
}


def settings(corpora: Sequence[str]) -> list[Setting]:
    """List all rows of the comparison.

    Args:
        corpora: names of the calibration texts.
    """
    rows = [Setting("unpruned", UNPRUNED, UNPRUNED, 0.0, Recipe()), *_main(), *_strategies(), *_metrics()]
    rows += [*_smoothing(), *_order(), *_alignment(), *_min_width(), *_sweep(), *_corpora(corpora), *_own(), *_topk()]
    return rows


def _main() -> Iterator[Setting]:
    for sparsity in SPARSITIES:
        for name, recipe in METHODS.items():
            yield Setting("main", name, name, sparsity, recipe(sparsity))


def _strategies() -> Iterator[Setting]:
    plain = ("uniform", "loss", "router_weight", "usage", "topk_channel")
    inside = {strategy: {"intra_layer": strategy} for strategy in plain}
    for prior in ("uniform", "usage", "router_weight", "loss", "attribution"):
        inside[f"coverage ({prior})"] = {"intra_layer": "coverage", "expert_prior": prior}
    between = {strategy: {"scope": "layers", "inter_layer": strategy} for strategy in ("uniform", "u_shaped", "loss")}
    for prior in ("uniform", "loss"):
        between[f"coverage ({prior})"] = {"scope": "layers", "inter_layer": "coverage", "layer_prior": prior}
    between["global"] = {"scope": "global"}
    for sparsity in SPARSITIES:
        for outer, outer_fields in between.items():
            for inner, inner_fields in inside.items():
                recipe = channels(sparsity, outer_fields | inner_fields)
                yield Setting("strategies", f"{outer} / {inner}", f"{outer} / {inner}", sparsity, recipe)


def _metrics() -> Iterator[Setting]:
    metrics = ("activation", "weight", "weight_activation", "gradient", "activation_gradient", "snip", "fisher")
    allocations = {
        "uniform width": recipes.UNIFORM,
        "inside layers, exact ALA": recipes.INSIDE_LAYERS,
        "best channels of the model": recipes.TOP_CHANNELS,
    }
    for sparsity in SPARSITIES:
        for allocation, coverage in allocations.items():
            for metric in metrics:
                recipe = channels(sparsity, coverage, metric=metric, importance="second_order")
                yield Setting("metrics", f"{allocation}: {metric}", metric, sparsity, recipe)


def _smoothing() -> Iterator[Setting]:
    for sparsity in SPARSITIES:
        for smoothing in ("none", "sqrt", "log", "huber", "clip"):
            recipe = channels(sparsity, {**recipes.PAPER, "smoothing": smoothing})
            yield Setting("smoothing", f"both levels: {smoothing}", smoothing, sparsity, recipe)


def _order() -> Iterator[Setting]:
    allocations = {"both levels": recipes.PAPER, "inside layers": recipes.INSIDE_LAYERS, "global": recipes.ONE_LEVEL}
    importances = ("first_order", "second_order", "nll_signed", "nll_absolute", "nll_squared")
    for sparsity in SPARSITIES:
        for allocation, coverage in allocations.items():
            for importance in importances:
                recipe = channels(sparsity, coverage, importance=importance)
                yield Setting("order", f"{allocation}: {importance}", importance, sparsity, recipe)


def _alignment() -> Iterator[Setting]:
    for sparsity in SPARSITIES:
        for method in ("paper", "recommended"):
            for name, alignment in _alignments().items():
                recipe = _aligned(method, sparsity, alignment)
                yield Setting("alignment", f"{method}: {name}", method, sparsity, recipe)


def _alignments() -> dict[str, recipes.Fields | None]:
    found: dict[str, recipes.Fields | None] = {"exact widths": None}
    for size in (64, 128, 256):
        for rule in ("l-r-c", "l-r-s"):
            found[f"a={size} {rule}"] = {**HAMILTON, "block_size": size, "min_width": size, "rule": rule}
        found[f"a={size} blocks"] = {**BLOCKS, "block_size": size}
    return found


def _min_width() -> Iterator[Setting]:
    for sparsity in SPARSITIES:
        for method in ("paper", "recommended"):
            for min_width in (0, 16, 32, 64, 128, 192):
                recipe = _aligned(method, sparsity, {**HAMILTON, "min_width": min_width})
                yield Setting("min_width", f"{method}: m={min_width}", method, sparsity, recipe)


def _aligned(method: str, sparsity: float, alignment: recipes.Fields | None) -> Recipe:
    if method == "paper":
        return channels(sparsity, recipes.PAPER, alignment)
    return recipes.recommended(sparsity, alignment)


def _sweep() -> Iterator[Setting]:
    for bits in SWEEP_BITS:
        yield Setting("sweep", UNPRUNED, UNPRUNED, 0.0, Recipe(), bits)
        for name in SWEEP_METHODS:
            for sparsity in SWEEP_SPARSITIES:
                yield Setting("sweep", name, name, sparsity, METHODS[name](sparsity), bits)


def _corpora(corpora: Sequence[str]) -> Iterator[Setting]:
    if len(corpora) < 2:  # all other tables are calibrated on the only corpus
        return
    for sparsity in SPARSITIES:
        for method in RECOMMENDED:
            for corpus in corpora:
                recipe = METHODS[method](sparsity)
                yield Setting("corpora", f"{method}: {corpus}", method, sparsity, recipe, corpus=corpus)


def _own() -> Iterator[Setting]:
    for corpus in (OWN, OWN_ENTIRE, MIXED, ALL_CORPORA):
        variants = {method: METHODS[method] for method in RECOMMENDED}
        if corpus in (OWN, ALL_CORPORA):
            variants["recommended, fits down_proj only"] = lambda p: recipes.recommended(p, reconstruct="down")
            variants |= {method: METHODS[method] for method in ("fisher", "fisher, no reconstruction")}
        variants[f"recommended, blocks of {2 * BLOCK}"] = lambda p: recipes.recommended(p, WIDE_BLOCKS)
        for sparsity in SPARSITIES:
            for method, recipe in variants.items():
                yield Setting("own", f"{corpus}: {method}", method, sparsity, recipe(sparsity), corpus=corpus)
        yield from _rounded(corpus)


def _rounded(corpus: str) -> Iterator[Setting]:
    """4 bits alone, and behind the recommended recipe."""
    roundings: tuple[Rounding, ...] = ("nearest", "gptq")
    for sparsity in (0.0, *SPARSITIES):
        recipe = recipes.recommended(sparsity) if sparsity else Recipe()
        for rounding in roundings:
            method = f"{'recommended' if sparsity else UNPRUNED}, {rounding}"
            name = f"{corpus}: {method}"
            yield Setting("own", name, method, sparsity, recipe, bits=4, rounding=rounding, corpus=corpus)


def _topk() -> Iterator[Setting]:
    for sparsity, name, recipe in ((0.0, UNPRUNED, Recipe()), (0.25, "recommended", recipes.recommended(0.25))):
        for top_k in TOP_K:
            yield Setting("topk", f"{name}: {top_k}", name, sparsity, recipe, top_k=top_k)
