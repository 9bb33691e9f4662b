"""The phenomena that can be named: what each is, what usually causes it, what to do, and which readings speak for or against it."""

from __future__ import annotations

from collections.abc import Mapping

from collapse_monitor.judge.phenomenon import Phenomenon
from collapse_monitor.judge.role_catalogue import ROLE_PHENOMENA

CATALOGUE: Mapping[str, Phenomenon] = {
    phenomenon.name: phenomenon
    for phenomenon in (
        Phenomenon(
            name="rank_collapse",
            summary="All tokens of a sequence have become nearly the same, so attention has nothing left to select and the gradients of "
            "queries and keys vanish.",
            next_step="check the residual path of the first layer named, and compare its branch_ratio with the layer before it",
            causes=(
                "the residual connection is missing, scaled down or overwritten",
                "deep post-norm without scaled residuals: every layer averages the tokens a little more",
                "uniform attention, or attention on one key, in a block that adds little else",
            ),
            remedies=(
                "scale each residual branch by 1/sqrt(depth) (Noci et al. 2022, arXiv 2206.03126)",
                "up-weight the skip, x <- LN(a x + f(x)) with a = (2 depth)^(1/4), DeepNorm (Wang et al. 2022, arXiv 2203.00555)",
            ),
            readings=(
                "token_similarity",
                "relative_residual",
                "effective_rank",
                "branch_ratio",
                "qk_to_v_gradient",
                "attention_uniformity",
            ),
            against="if all gradients of the early layers are small, those of the values too, they vanish for another reason",
            rises=("token_similarity",),
            falls=("relative_residual", "effective_rank", "qk_to_v_gradient"),
        ),
        Phenomenon(
            name="oversmoothing",
            summary="Tokens of a sequence are becoming alike: the layers keep what tokens share and lose what tells them apart.",
            next_step="see in which layer relative_residual begins to fall, and whether validation suffers: mild smoothing may be harmless",
            causes=(
                "attention works as a low-pass filter that the residual branch no longer balances",
                "the objective needs no token-wise information (one pooled label)",
                "weight decay or a low learning rate on the value and output projections",
            ),
            remedies=(
                "re-weight the high frequencies of attention and features, AttnScale and FeatScale (Wang et al. 2022, arXiv 2203.05962)",
                "contrast tokens within a sequence, ContraNorm (Guo et al. 2023, arXiv 2303.06562)",
            ),
            readings=("token_similarity", "relative_residual", "effective_rank", "attention_uniformity", "branch_ratio"),
            against="the rank may stay full while cosines rise, and the loss may be fine",
            rises=("token_similarity",),
            falls=("relative_residual", "contraction", "effective_rank"),
        ),
        Phenomenon(
            name="attention_entropy_collapse",
            summary="Most heads look at a single key per query: softmax is saturated, its gradient gone, training becomes unstable.",
            next_step="look at max_logit and logit_std of the same heads, and lower the learning rate of the query and key projections",
            causes=(
                "the learning rate is too high, or warm-up too short, for the query and key weights",
                "query and key norms grow without bound",
                "a change of the attention scale or of the normalisation in front of it",
            ),
            remedies=(
                "divide the weights by their spectral norm, sigma-reparametrisation (Zhai et al. 2023, arXiv 2303.06296)",
                "normalise queries and keys, QK-norm (Dehghani et al. 2023, arXiv 2302.05442)",
            ),
            readings=("attention_uniformity", "max_logit", "logit_std", "sink_mass", "qk_to_v_gradient"),
            against="single sharp heads point, and heads on the first keys are sinks: both are healthy",
            rises=("max_logit", "logit_std"),
            falls=("attention_uniformity",),
        ),
        Phenomenon(
            name="logit_explosion",
            summary="Attention logits have grown out of the range in which softmax can select: one-hot attention and divergence follow.",
            next_step="keep the last good checkpoint, and compare the norms of the query and key weights with those of the other layers",
            causes=(
                "query and key norms drift upwards, in one head or in all of them",
                "an optimiser with large updates and no clipping of the logits",
                "the attention scale is missing or applied twice",
            ),
            remedies=(
                "clip the query and key weights when a logit passes 100, QK-clip (Kimi K2, Moonshot AI 2025, arXiv 2507.20534)",
                "normalise queries and keys, QK-norm (Dehghani et al. 2023, arXiv 2302.05442; Wortsman et al. 2023, arXiv 2309.14322)",
            ),
            readings=("max_logit", "logit_std", "attention_uniformity", "qk_spectral_norm", "gradient_norm"),
            against="a constant added to all logits of a row changes nothing: logit_std stays small",
            rises=("max_logit", "logit_std", "qk_spectral_norm"),
        ),
        Phenomenon(
            name="non_finite",
            summary="NaN or infinity has appeared and spreads to every layer behind it.",
            next_step="go back to the last good checkpoint, and run the same batch under torch.autograd.detect_anomaly",
            causes=(
                "overflow in half precision: large logits, norms or gradients",
                "a division by zero or a logarithm of zero, also in the data or the loss",
                "a fully masked attention row",
            ),
            remedies=(
                "train in bfloat16 with fp32 softmax and norms (Kalamkar et al. 2019, arXiv 1905.12322)",
                "clip the gradient norm (Pascanu et al. 2013, arXiv 1211.5063) and bound the logits (Zhai et al. 2023, arXiv 2303.06296)",
            ),
            readings=("nonfinite", "max_logit", "massive_activation", "gradient_norm"),
            against="a gradient scaler provokes infinite gradients now and then on purpose",
            rises=("nonfinite",),
        ),
        *ROLE_PHENOMENA,
    )
}
"""Every phenomenon by name. Rules of your own need no entry: their findings then carry the evidence alone."""
