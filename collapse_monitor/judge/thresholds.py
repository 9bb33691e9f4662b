"""Every number the verdict rests on, in one table, with the reason and the source of each.

`fire` starts an alert and `hold` keeps one that is firing: between them nothing changes. A drop or a rise is a factor against the
run's own baseline, in the scale of the reading (`SCALES`); it counts only if it is also `SIGMAS` deviations large. What is `measured` was
measured on seeds 0 and 1 of benchmarks/verdict.py; seeds from 2 on are held out, and docs/verdict.md reports them.
"""

from __future__ import annotations

from collections.abc import Mapping

from collapse_monitor.judge.role_thresholds import ROLE_TABLE
from collapse_monitor.judge.threshold import Level, Scale, Threshold

_TABLE = (
    Threshold(
        "rank_collapse.similarity",
        0.99,
        0.98,
        "Tokens of equal norm with a mean cosine of .99 differ by a tenth of their length. Small healthy models start at .80 to .96, "
        "a network without residual connections passes .99 in its first two blocks.",
        "Dong et al. 2021 (BERT without skips: relative residual .61, .018, 0); measured on digit ViTs and byte GPTs",
    ),
    Threshold(
        "rank_collapse.rank_share_of_similar",
        0.35,
        0.45,
        "A cosine of .99 with a full spectrum is anisotropy, no collapse. With isotropic differences it leaves 19 to 31 % of the rank.",
        "Wu et al. 2024: trained language models keep full rank while cosines rise; the share is a closed form",
    ),
    Threshold(
        "rank_collapse.contraction",
        0.35,
        0.35,
        "Residual after a block over that before it. While a healthy model first learns what all tokens share, every block smooths a "
        "little and similarity may pass .99 for 100 steps: no inner block then goes below .42. Without residual path: .33 and less.",
        "measured on digit ViTs and byte GPTs, from the first step on, learning rates 1e-3 to 5e-3",
    ),
    Threshold(
        "rank_collapse.edge_contraction",
        0.07,
        0.07,
        "The same for the first block, whose input may be small beside what it adds (healthy: .10 and more), and for the last one where it "
        "is the only one found: before a pooling smoothing does no harm.",
        "measured on digit ViTs and byte GPTs",
    ),
    Threshold(
        "rank_collapse.erased_before",
        0.2,
        0.2,
        "Contraction of an inner block that makes it the culprit for alike tokens behind it, though its own output is only nearly alike "
        "(cosine above `oversmoothing.similarity`).",
        "measured: one block without residual path .11 to .19, healthy blocks .42 and more",
    ),
    Threshold(
        "rank_collapse.residual_drop",
        4.0,
        2.5,
        "Relative residual this many times below the own baseline, for a collapse that many blocks share.",
        "measured: healthy residuals change by less than twice within the baseline's window",
    ),
    Threshold(
        "rank_collapse.lost_residual",
        0.5,
        0.7,
        "A collapse without a culprit counts when it lasts and the residual is this far below that of the network's input: "
        "inputs may be alike from the start.",
        "Dong et al. 2021: the residual falls with every layer",
    ),
    Threshold(
        "rank_collapse.complete_residual",
        0.003,
        0.003,
        "Tokens that are the same to three per mille: `critical` also without a culprit. The rounding noise of bf16 is .001.",
        "closed form: 2^-9 / sqrt 3; measured: healthy early training stays above .01",
    ),
    Threshold(
        "rank_collapse.effective_rank",
        2.0,
        2.5,
        "Fewer than two directions carry all tokens. Healthy tiny ViTs keep 3 or more from the first step on.",
        "Roy and Vetterli 2007; measured: 1.0 to 1.4 without residual connections",
    ),
    Threshold(
        "rank_collapse.multiples",
        0.95,
        0.97,
        "Below this similarity a low rank is not the shadow of alike tokens: they are multiples of one direction.",
        "measured: rank-1 features leave the similarity where it was, .88",
    ),
    Threshold(
        "rank_collapse.rank_drop",
        3.0,
        2.0,
        "Effective rank this many times below the own baseline. It falls as much in the first 100 steps only.",
        "measured on digit ViTs and byte GPTs: rank-4 features 3.4, healthy below 1.5 after 200 steps",
    ),
    Threshold(
        "rank_collapse.rank_share",
        0.25,
        0.35,
        "A drop matters only where it ends low: this share of the attainable rank.",
        "measured: healthy blocks end between .3 and .9 where they were not lower before",
    ),
    Threshold(
        "rank_collapse.smallest_attainable_rank",
        8.0,
        8.0,
        "With fewer tokens or channels a rank cannot be low by more than chance: ranks are not judged.",
        "closed form: 4 tokens with cosine .99 still have 45 % of the attainable rank",
    ),
    Threshold(
        "oversmoothing.similarity",
        0.90,
        0.85,
        "Over-smoothing is a cosine of .6 to .95. Fire near the upper end, because healthy small models live in this range.",
        "Zhou et al. 2021, Shi et al. 2022",
    ),
    Threshold(
        "oversmoothing.gap_drop",
        3.0,
        2.0,
        "1 - similarity this many times below the own baseline. Healthy: less than twice within the baseline's window.",
        "measured on digit ViTs and byte GPTs",
    ),
    Threshold(
        "oversmoothing.contraction_drop",
        1.2,
        1.1,
        "One block that smooths this many times more than it used to, and far more than its spread.",
        "measured: a block that loses its residual path 1.25 to 2.8, healthy blocks below 1.2 within the baseline's window",
    ),
    Threshold(
        "oversmoothing.sigmas",
        4.0,
        0.0,
        "Deviations, of the last 16 checks, by which such a block must jump. It then counts for as long as it stands off its baseline.",
        "measured: the baseline of a byte GPT remembers early training, and its deviation is too wide to see one block lose its residuals",
    ),
    Threshold(
        "oversmoothing.by_itself",
        8.0,
        4.0,
        "Jump of such a block over that of any block before it, in the logarithm: what comes with the data shows from the first block on, "
        "and blocks behind the one that changed are no measure, for they follow it.",
        "measured on seeds 0 and 1: 20 and more for one block without residual path, 3.5 and less after shifts of the data",
    ),
    Threshold(
        "oversmoothing.partial_similarity",
        0.35,
        0.25,
        "Similarity from which such a block counts: the other blocks add to it.",
        "Zhou et al. 2021, Shi et al. 2022: a cosine of .6 to .95; measured: .39 and more in a block without residual path",
    ),
    Threshold(
        "oversmoothing.partial_drop",
        1.4,
        1.2,
        "1 - similarity this many times below the own baseline, behind such a block.",
        "measured on digit ViTs and byte GPTs",
    ),
    Threshold(
        "attention_entropy_collapse.uniformity",
        0.25,
        0.35,
        "Row entropy at a quarter of its maximum: a row looks at about n^(1/4) of n keys.",
        "Zhai et al. 2023; measured: .19 or more per head when healthy, .02 to .03 with query and key weights x 12",
    ),
    Threshold(
        "attention_entropy_collapse.uniformity_drop",
        2.5,
        1.7,
        "Uniformity this many times below the head's own baseline.",
        "measured: healthy heads sharpen by less than twice within the baseline's window",
    ),
    Threshold(
        "attention_entropy_collapse.one_hot",
        0.05,
        0.10,
        "Absolute bound: next to all rows look at one key.",
        "Zhai et al. 2023, Dehghani et al. 2023",
    ),
    Threshold(
        "attention_entropy_collapse.logit_std",
        5.0,
        4.0,
        "Deviation of a row's logits that marks a cause in the weights. For iid logits of deviation s the entropy falls by s^2/2, one-hot "
        "at sqrt(2 log n) = 3.7 for 1000 keys; a sink or a pointer needs only one large logit and stays below.",
        "random energy model (Giorlandino and Goldt 2025); measured: sinks below 5, query and key weights x 12 above 100",
    ),
    Threshold(
        "attention_entropy_collapse.sink_mass",
        0.30,
        0.30,
        "A head that puts this much on the first keys is an attention sink: information, unless its logits are large as a whole.",
        "Gu et al. 2024, epsilon = .3",
    ),
    Threshold(
        "attention_entropy_collapse.share_of_heads",
        0.5,
        0.4,
        "One sharp head is how healthy models point; half of a block's heads is a collapse.",
        "Voita et al. 2019; measured on byte GPTs",
    ),
    Threshold(
        "attention_entropy_collapse.critical_share",
        0.75,
        0.75,
        "Share of a block's heads (at least two) that are one-hot for `critical`.",
        "convention",
    ),
    Threshold(
        "logit_explosion.max_logit",
        100.0,
        70.0,
        "Where QK-clip steps in. Healthy small models reach 10 to 40.",
        "Kimi K2 2025, tau = 100",
    ),
    Threshold(
        "logit_explosion.rise",
        4.0,
        2.5,
        "1 + max logit this many times above the own baseline: pretrained models may live with large logits.",
        "measured: healthy logits grow by less than three times within the baseline's window",
    ),
    Threshold(
        "logit_explosion.critical",
        1e3,
        1e3,
        "Logits of 1000 differ by 4 in bf16 and end in one-hot attention.",
        "Kimi K2 2025: vanilla Muon passes 1000; all runs above 1e4 diverged in Wortsman et al. 2023",
    ),
    Threshold(
        "logit_explosion.diverged",
        1e4,
        7e3,
        "Critical without any baseline.",
        "Wortsman et al. 2023: all points with attention logits above 1e4 diverged",
    ),
    Threshold(
        "logit_explosion.logit_std",
        10.0,
        7.0,
        "Without a baseline, large logits count only where rows vary: a key bias shifts all logits of a row, which softmax does not see.",
        "softmax is invariant to a shift of a row",
    ),
    Threshold(
        "non_finite.share",
        0.0,
        0.0,
        "Any value that is not finite spoils everything downstream.",
        "IEEE 754",
    ),
)

LEVELS: tuple[Level, Level] = ("fire", "hold")

THRESHOLDS: Mapping[str, Threshold] = {threshold.name: threshold for threshold in (*_TABLE, *ROLE_TABLE)}


def bound(name: str, level: Level) -> float:
    """The number of one threshold.

    >>> bound("oversmoothing.similarity", "fire"), bound("oversmoothing.similarity", "hold")
    (0.9, 0.85)
    """
    threshold = THRESHOLDS[name]
    return threshold.fire if level == "fire" else threshold.hold


SIGMAS = 5.0
"""Deviations from the own baseline that a change must reach beside its factor: with 576 series and 1e6 checks chance must not fire."""

OUTLIER_SIGMAS = 4.0
"""Deviations beyond which a reading teaches its baseline no more than one just so far off."""

SMALLEST_DEVIATION: Mapping[Scale, float] = {"linear": 0.01, "log": 0.05, "log1p": 0.05, "gap": 0.05}
"""Floor of a baseline's deviation, in its scale: a series that stood still must not make a change of 1 % look like 100 sigma."""

SAME_STREAM = 1.5
"""Factor within which the residual that a block is given agrees with that of the block before it, where it is given its output: the first
block of a decoder is given other tokens."""

WARMUP_CHECKS = 16
"""Checks before a baseline counts: rank, similarity and logits move fastest in the first steps."""

TRANSIENT_STEPS = 200
"""Optimizer steps before token readings are compared with a baseline, and that alike tokens must last where no block is the culprit: while
a model first learns what all tokens share, they are alike for up to 150 steps, in whatever number of checks."""

OVERFIT_STEPS = 100
"""Steps that a validation loss must stay above its lowest value: on few samples it jumps."""

TRANSIENT_CHECKS = 8
"""Checks that go with it, for those who check rarely and warm up long."""

WINDOW_CHECKS = 40
"""Memory of a baseline in checks: long enough to notice a collapse of hundreds of steps, short enough to follow healthy drift."""

ANCHOR_EVERY, ANCHOR_MEMORY = 4, 100
"""Checks between two moves of a baseline's anchor, and how many moves it remembers: ten times as long as the baseline itself, for a
collapse over thousands of steps."""

FOR_CHECKS = 2
"""Checks in a row that confirm a condition before it fires."""

CLEAR_CHECKS = 3
"""Checks in a row without the condition before it is resolved."""

NO_DATA_CHECKS = 3
"""Checks in a row without a reading before that is an event: one short batch is none."""

GRADIENT_CHECKS = 3
"""Checks in a row with an infinite gradient that count as non-finite: a gradient scaler provokes one now and then on purpose."""

REMIND_CHECKS = 100
"""Checks between two reminders, in the log, of an alert that keeps firing."""

SCALES: Mapping[str, Scale] = {
    "attention_uniformity": "log",
    "branch_ratio": "log",
    "contraction": "log",
    "dependent_share": "log",
    "dominant_column": "log",
    "effective_keys": "log",
    "effective_rank": "log",
    "gradient_gain": "log",
    "gradient_norm": "log",
    "head_similarity": "gap",
    "input_dependence": "log",
    "layer_similarity": "gap",
    "logit_std": "log",
    "massive_activation": "log",
    "max_logit": "log1p",
    "parameter_gradient_norm": "log",
    "participation_ratio": "log",
    "pooled_rank": "log",
    "qk_to_v_gradient": "log",
    "qk_to_v_weight_gradient": "log",
    "rank_share": "log",
    "relative_residual": "log",
    "composite_residual": "log",
    "residual_norm": "log",
    "selectivity": "log",
    "stable_rank": "log",
    "token_similarity": "gap",
}
"""Scale of each reading's baseline: `log` for positive ones, `log1p` for logits, `gap` (log of 1 - x) for a cosine; others linear."""
