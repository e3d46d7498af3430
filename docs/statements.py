"""Fill the Statements page when the site is built: every numbered statement of the sources, and what carries it here.

A carrier is the name of an experiment, or the full name of a function or class. The tests check that every carrier
exists, that it names its statement in its source, docstring or claims, and that every experiment carries a statement.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from lazyscope.experiments import experiments

MARK = "<!-- statements -->"


@dataclass(frozen=True)
class Statement:
    """One statement of a source.

    Args:
        label: The number or the title in the source.
        words: What it says, in a few words.
        carriers: The experiments and functions that compute, prove or check it.
        cited: The words by which at least one carrier refers to the statement.
    """

    label: str
    words: str
    carriers: tuple[str, ...]
    cited: str


PAPER = "Chizat, Oyallon, Bach 2019: On Lazy Training in Differentiable Programming"
SUPPLEMENT = "The supplement of the same paper"
LECTURE = "Hadiji 2023: lecture slides, Class III, Lazy training"
POSTER = "Ghorbani, Mei, Misiakiewicz, Montanari 2019: Limitations of Lazy Training (poster)"
TALK = "Chizat 2020: Analyses of gradient methods for wide two-layer neural networks (talk)"

BEYOND = "Later papers: between lazy and rich"

HIGH = "lazyscope.theory.high_dimension"

STATEMENTS: dict[str, list[Statement]] = {
    PAPER: [
        Statement("Figure 1(a,b)", "paths of neurons, lazy and not", ("cover",), "Figure 1(a,b)"),
        Statement("Figure 1(c)", "test loss against τ", ("scale",), "Figure 1(c)"),
        Statement(
            "§1.2, equation (1)",
            "κ, the inverse relative scale; scaled, homogeneous and wide models",
            ("relative-scale", "lazyscope.theory.relative_scale"),
            "equation (1)",
        ),
        Statement("§1.2, any loss", "the first criterion", ("lazyscope.theory.RelativeScale",), "criterion of section"),
        Statement("Equation (2)", "the objective of the scaled model", ("lazyscope.Scaled",), "equation (2)"),
        Statement("Equation (3)", "the linearised model", ("lazyscope.Linearised",), "equation (3)"),
        Statement("Equation (4)", "gradient flow", ("lazyscope.gradient_flow",), "equation (4)"),
        Statement("Equation (5)", "gradient flow of the linearised model", ("lazyscope.tangent_flow",), "equation (5)"),
        Statement("Assumption 2.1", "Dh and the gradient of R", ("lazyscope.theory.general",), "Assumption 2.1"),
        Statement("Theorem 2.2", "any horizon T, any smooth R", ("rates", "lazyscope.theory.general"), "Thm 2.2"),
        Statement("Theorem 2.3", "square loss, with constants", ("lazyscope.theory.finite_horizon",), "Theorem 2.3"),
        Statement(
            "Theorem 2.4", "over-parameterised, all t", ("rates", "lazyscope.theory.over_parameterised"), "Theorem 2.4"
        ),
        Statement(
            "Theorem 2.5",
            "under-parameterised, all t; with constants",
            ("certificates", "lazyscope.theory.under_parameterised"),
            "2.5",
        ),
        Statement("Figure 2(a)", "test loss against m", ("width",), "Figure 2(a)"),
        Statement("Figure 2(b)", "SGD on the population loss against τ", ("population",), "Figure 2(b)"),
        Statement("Figure 3(a)", "VGG-11 against α", ("cnn-scale",), "Figure 3(a)"),
        Statement("Figure 3(b)", "wide convolutional nets, and linear ones", ("cnn-wide",), "Figure 3(b)"),
        Statement("§3.2", "the linear model is ill-conditioned", ("conditioning",), "Section 3.2"),
        Statement(
            "§3.2", "linearised nets and their limit of infinite width", ("cnn-limit", "dense-limit"), "Section 3.2"
        ),
    ],
    SUPPLEMENT: [
        Statement("A.2, Eq. (8), Figure 4", "limit of the tangent kernel", ("kernel-limit",), "Figure 4"),
        Statement("Proposition A.1", "generalising like the tangent model", ("rates",), "Proposition A.1"),
        Statement("B.1 to B.5", "proofs, with constants", ("certificates",), "B.1–B.5"),
        Statement("Lemma B.1", "gradient flow in a changing metric", ("lazyscope.theory.linear_rate",), "Lemma B.1"),
        Statement("Lemma B.2", "stability", ("lazyscope.theory.stability",), "Lemma B.2"),
        Statement("Figure 5", "the manifold, its tangent plane and both paths", ("geometry",), "Figure 5"),
        Statement("C.1, Figure 6", "200 neurons", ("many-neurons",), "Figure 6"),
        Statement("C.2", "stability of activations", ("cnn-scale", "lazyscope.diagnose.activation_stability"), "C.2"),
        Statement("Figure 7(a)", "losses at the end of training", ("cnn-scale",), "Figure 7(a)"),
        Statement("C.3, Figure 7(b)", "spectrum of the tangent kernel", ("cnn-spectrum",), "Figure 7(b)"),
    ],
    LECTURE: [
        Statement(
            "Convex optimisation",
            "quadratics, |w|, Huber, conditioning, exercises a to c",
            ("convex", "convex-plane", "convex-exercises"),
            "convex optimisation",
        ),
        Statement("Figure 2", "level sets, and paths of gradient descent", ("convex-plane",), "level"),
        Statement("Linear models", "least squares with p > n, p < n and any rank", ("least-squares",), "linear models"),
        Statement("Definition", "κ for the square loss", ("relative-scale",), "Hadiji 2023"),
        Statement("Theorem (Chizat, Oyallon, Bach '19)", "trajectories within O(1/α²)", ("rates",), "O(1/α²)"),
        Statement(
            "Proposition (infinite width)", "κ → 0 as m → ∞, and Le Cun's scaling", ("relative-scale",), "Le Cun"
        ),
        Statement("Figure 3", "accuracies of the paper", ("cnn-scale", "cnn-wide"), "Figure 3(b)"),
        Statement("Neural tangent kernel", "its limit in wide nets", ("wide-limit",), "Hadiji 2023"),
    ],
    POSTER: [
        Statement(
            "Theorem 1",
            "random features",
            ("quadratic", HIGH + ".random_features"),
            "Theorem 1",
        ),
        Statement("Theorem 2", "neural tangent", ("quadratic", HIGH + ".neural_tangent"), "Theorem 2"),
        Statement("Theorem 3", "trained nets", ("quadratic", HIGH + ".network"), "Theorem 3"),
        Statement("Figure 1", "risks on a quadratic target", ("quadratic",), "Figure 1"),
        Statement("Figure 2", "a mixture of Gaussians", ("mixture", HIGH + ".mixture"), "Figure 2"),
        Statement("Figure 3", "the same with ReLU, and the limit for any σ", ("quadratic-relu",), "Figure 3"),
        Statement("How general are these phenomena?", "cubic targets, N ≥ d", ("cubic",), "How general"),
    ],
    TALK: [
        Statement("Adaptivity", "y = g(Ax) with few rows in A", ("adaptivity",), "Adaptivity"),
        Statement(
            "Theorem, mean-field dynamic",
            "particles follow the Wasserstein flow",
            ("mean-field",),
            "mean-field dynamic",
        ),
        Statement("Theorem, global convergence", "full support at the start", ("particles",), "full support"),
        Statement("Corollary, global convergence", "F tends to its infimum", ("particles",), "lim F(μ_{m,t}) = inf F"),
        Statement("Numerical illustrations", "5, 10 and 100 neurons; risk against m", ("particles",), "illustrations"),
        Statement("Sparse deconvolution", "conic particle descent on T²", ("deconvolution",), "sparse deconvolution"),
        Statement("Theorem, sharpness", "Polyak–Łojasiewicz inequality", ("sharpness",), "sharpness theorem"),
        Statement("Corollary, sharpness", "exponential convergence", ("sharpness",), "corollary: exponentially fast"),
        Statement(
            "Theorem, quantitative global convergence", "W∞ and β/α", ("sharpness",), "quantitative global convergence"
        ),
        Statement(
            "Lemma, mirror descent rate",
            "log t / t for β = 0",
            ("deconvolution", "lazyscope.theory.entropy_bound"),
            "mirror",
        ),
        Statement("Theorem (Soudry et al.)", "linear classifiers tend to the SVM", ("margin",), "svm"),
        Statement("Theorem, implicit bias", "max-margin classifiers in F₁ and F₂", ("margin",), "implicit bias"),
        Statement(
            "Theorem (Non-asymptotic)", "any horizon, R may not be convex", ("rates",), "R potentially non-convex"
        ),
        Statement("Theorem (Strongly convex)", "all times, R strongly convex", ("rates",), "R strongly convex"),
        Statement("Figure 5", "VGG-11 on CIFAR-10", ("cnn-scale",), "talk's Figure 5"),
        Statement("Neural Tangent Kernel", "1/√m against 1/m", ("wide-limit",), "Neural Tangent Kernel"),
        Statement("Relative scale", "κ ≍ (mα(m))⁻¹ and where it fails", ("relative-scale",), "talk"),
    ],
    BEYOND: [
        Statement("Woodworth et al. 2020", "the bias of diagonal nets between ℓ₁ and ℓ₂", ("diagonal",), "Woodworth"),
        Statement("Saxe 2014 to Dominé 2024", "exact trajectories of linear nets", ("deep-linear",), "Saxe"),
        Statement("Kumar et al. 2024", "grokking as a change from lazy to rich", ("grokking",), "Kumar"),
        Statement("Atanasov et al. 2025", "the best step against richness", ("richness",), "Atanasov"),
        Statement("Geiger et al. 2020", "curves collapse in α√m", ("collapse",), "Geiger"),
        Statement("Ortiz-Jiménez et al. 2023", "task vectors of linearised nets", ("fine-tuning",), "Ortiz-Jiménez"),
        Statement("Yang et al. 2021 to 2024", "scalings of width and depth", ("depth",), "Yang"),
        Statement("κ = 1", "where the lazy phase of a model ends", ("phases", "lazyscope.phases"), "section 1.2"),
    ],
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark by the tables. MkDocs calls this for every page."""
    return markdown.replace(MARK, "\n\n".join(table(name, rows) for name, rows in STATEMENTS.items()))


def table(source: str, rows: list[Statement]) -> str:
    """Return the heading and the table of one source."""
    lines = [f"## {source}", "", "| statement | what it says | carried by |", "|---|---|---|"]
    lines += [f"| {row.label} | {row.words} | {', '.join(map(link, row.carriers))} |" for row in rows]
    return "\n".join(lines)


def link(carrier: str) -> str:
    """Return a link to a figure, or the name of a function."""
    if carrier not in experiments():
        return f"`{carrier}`"
    title = experiments()[carrier].title
    return f"figure [`{carrier}`](figures.md#{anchor(title)})"


def anchor(title: str) -> str:
    """Return the anchor that MkDocs gives a heading."""
    words = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())
