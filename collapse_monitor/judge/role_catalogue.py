"""The phenomena of what a block does: what its attention selects, what passes through it, and how samples and tokens use it."""

from __future__ import annotations

from collapse_monitor.judge.phenomenon import Phenomenon

ROLE_PHENOMENA = (
    Phenomenon(
        name="width_collapse",
        summary="One block of near-uniform attention has put next to all energy into one direction; the longer the sequence, the more.",
        next_step="probe the model with a sequence four times as long: in width the stable_rank falls with the number of tokens",
        causes=(
            "the spectral gap of softmax: random maps have one large singular value, whose share grows with the number of tokens",
            "no residual connection, or a small one, around that block",
        ),
        remedies=(
            "take the mean off the attention map, A - 11^T/n (Saada, Naderi and Tanner 2024, arXiv 2410.07799)",
            "attend by the difference of two maps, which cancels what they share (Ye et al. 2024, arXiv 2410.05258)",
        ),
        readings=("stable_rank", "contraction", "attention_uniformity", "token_similarity"),
        against="a residual that falls a little in every block is collapse in depth, not in width",
        rises=("token_similarity",),
        falls=("stable_rank", "contraction"),
    ),
    Phenomenon(
        name="uniform_attention",
        summary="A block that used to select now attends to all keys alike: its attention is an average.",
        next_step="compare the norms of its query and key weights with other layers, and their gradients with those of the values",
        causes=(
            "query and key weights have shrunk, by weight decay or because their gradients vanished",
            "a temperature, scale or normalisation in front of softmax that is too flat",
            "the tokens that it is given are alike",
        ),
        remedies=(
            "scale the high frequencies of the map up, AttnScale (Wang et al. 2022, arXiv 2203.05962)",
            "normalise queries and keys and learn their scale, QK-norm (Henry et al. 2020, arXiv 2010.04245)",
        ),
        readings=("attention_uniformity", "logit_std", "effective_keys", "relative_residual", "qk_to_v_gradient"),
        against="healthy attention is uniform at initialisation, and in blocks that only average",
        rises=("attention_uniformity", "effective_keys"),
        falls=("logit_std", "input_dependence"),
    ),
    Phenomenon(
        name="attention_sink",
        summary="Heads park on one of the first keys: they do nothing there, and the model is healthy. This is information.",
        next_step="nothing, unless the model is to be quantised or to read longer sequences than it was trained on",
        causes=("softmax must sum to one, and a head with nothing to do puts its mass on a token that says little",),
        remedies=(
            "give the model registers to park on (Darcet et al. 2023, arXiv 2309.16588)",
            "let heads abstain, by a sink logit or a gate (Xiao et al. 2023, arXiv 2309.17453)",
        ),
        readings=("sink_mass", "attention_uniformity", "massive_activation", "branch_ratio"),
        against="on short sequences uniform attention puts as much on the first keys",
        rises=("sink_mass", "massive_activation"),
        falls=("attention_uniformity",),
    ),
    Phenomenon(
        name="single_column_attention",
        summary="Every query of a block looks at one and the same key: its attention map has rank one and adds the same to every token.",
        next_step="see whether block_influence of the same blocks is low too: then they can be left out",
        causes=(
            "more layers than the task needs: deep blocks become lazy",
            "one key has grown far larger than the others",
        ),
        remedies=(
            "train fewer layers, and grow the model from its working ones, Inheritune (Sanyal et al. 2024, arXiv 2404.08634)",
            "normalise queries and keys, QK-norm (Henry et al. 2020, arXiv 2010.04245)",
        ),
        readings=("dominant_column", "dobrushin", "attention_uniformity", "sink_mass", "block_influence"),
        against="a column among the first four keys is a sink",
        rises=("dominant_column", "layer_similarity"),
        falls=("dobrushin", "attention_uniformity", "input_dependence"),
    ),
    Phenomenon(
        name="head_redundancy",
        summary="The heads of a block look at the same keys: all but one could go.",
        next_step="prune heads of this block one by one, and see whether validation notices",
        causes=(
            "more heads than the block has use for",
            "heads share their weights, by tying or by an initialisation that makes them equal",
        ),
        remedies=(
            "penalise agreement between heads (Li et al. 2018, arXiv 1810.10183)",
            "mix the heads before and after softmax, talking heads (Shazeer et al. 2020, arXiv 2003.02436)",
            "prune the heads that add nothing (Michel et al. 2019, arXiv 1905.10650)",
        ),
        readings=("head_similarity", "attention_uniformity", "sink_mass", "input_dependence"),
        against="uniform heads and heads that park on a sink are alike without being redundant",
        rises=("head_similarity",),
    ),
    Phenomenon(
        name="attention_stagnation",
        summary="A block looks where the block before it looked: depth adds no new attention.",
        next_step="see whether the features stagnate too: block_influence of the same blocks",
        causes=(
            "a deep Vision Transformer whose features change little from block to block",
            "weights that are shared, or that one block copied from the other",
        ),
        remedies=(
            "mix the heads after softmax with learned weights, Re-attention (Zhou et al. 2021, arXiv 2103.11886)",
            "train fewer layers, and grow the model from its working ones (Sanyal et al. 2024, arXiv 2404.08634)",
        ),
        readings=("layer_similarity", "attention_uniformity", "head_similarity", "block_influence"),
        against="uniform maps and sinks are alike in every layer",
        rises=("layer_similarity",),
        falls=("block_influence",),
    ),
    Phenomenon(
        name="input_independent_attention",
        summary="A block looks at the same positions whatever the input is: its attention is a fixed filter.",
        next_step="see whether queries and keys still receive gradients, and how large the positional term of the logits is",
        causes=(
            "the positional part of queries and keys outweighs their content",
            "the content path to queries and keys is dead: weights at zero, a detached or constant input",
        ),
        remedies=(
            "keep content and position apart in the logits (Ke et al. 2020, arXiv 2006.15595)",
            "normalise queries and keys and learn their scale, QK-norm (Henry et al. 2020, arXiv 2010.04245)",
        ),
        readings=("input_dependence", "attention_uniformity", "head_similarity", "qk_to_v_gradient"),
        against="single heads that follow positions are normal; uniform attention is the same for every input too",
        falls=("input_dependence",),
    ),
    Phenomenon(
        name="bypassed_attention",
        summary="What attention adds is nothing beside the stream: the block lives on its residual connection alone.",
        next_step="look at the gate, layer scale or output projection of that attention, and at the norm of the stream in front of it",
        causes=(
            "deep pre-norm: the stream grows with depth and outweighs what each block adds",
            "a gate or layer scale that is stuck near zero",
            "weight decay on an output projection that gets no gradient",
        ),
        remedies=(
            "scale the output of the norm by 1/sqrt(depth), LayerNorm Scaling (Sun et al. 2025, arXiv 2502.05795)",
            "normalise the branch as well as its input, Peri-LN (Kim et al. 2025, arXiv 2502.02732)",
        ),
        readings=("branch_ratio", "block_influence", "residual_norm", "token_similarity"),
        against="layer scales and ReZero start near zero on purpose and grow; the tokens themselves are healthy",
        falls=("branch_ratio", "block_influence"),
    ),
    Phenomenon(
        name="vanishing_gradient",
        summary="Gradients lose their size on the way back: the layers in front stop learning, those behind do not.",
        next_step="compare gradient_norm of the layer named with that of the one before it",
        causes=(
            "deep post-norm without warm-up",
            "a saturated or detached function in that block",
            "an initialisation that is too small for the depth",
        ),
        remedies=(
            "put the norm in front of each branch, pre-norm (Xiong et al. 2020, arXiv 2002.04745)",
            "up-weight the skip, DeepNorm (Wang et al. 2022, arXiv 2203.00555)",
        ),
        readings=("gradient_norm", "parameter_gradient_norm", "qk_to_v_gradient", "relative_residual"),
        against="where only the gradients of queries and keys vanish (qk_to_v_gradient falls) it is rank collapse",
        falls=("gradient_norm", "parameter_gradient_norm"),
    ),
    Phenomenon(
        name="exploding_gradient",
        summary="Gradients grow on the way back: the layers in front get updates many times too large.",
        next_step="look at the weights of the layer named, and log the gradient norm before clipping",
        causes=(
            "weights or gains that are too large in that block",
            "an initialisation that is too large for the depth",
            "a loss or normaliser that divides by a value near zero",
        ),
        remedies=(
            "clip the gradient norm (Pascanu et al. 2013, arXiv 1211.5063)",
            "scale the initialisation of values, outputs and MLPs down, DeepNorm (Wang et al. 2022, arXiv 2203.00555)",
        ),
        readings=("gradient_norm", "parameter_gradient_norm", "max_logit", "massive_activation"),
        against="when all layers grow alike it is the loss, or the loss scale, that has grown",
        rises=("gradient_norm", "parameter_gradient_norm"),
    ),
    Phenomenon(
        name="dimensional_collapse",
        summary="The sequence means of different samples differ in few directions only: the representation does not use its width.",
        next_step="look at the spectrum of a few thousand sequence means: the queue behind pooled_rank holds 64",
        causes=(
            "a self-supervised objective with a shortcut",
            "a bottleneck, or a projection of low rank, in that block",
            "anisotropy: a few directions carry what all samples share",
        ),
        remedies=(
            "add variance and covariance terms to the loss, VICReg (Bardes et al. 2021, arXiv 2105.04906)",
            "whiten the representation (Ermolov et al. 2020, arXiv 2007.06346)",
        ),
        readings=("pooled_rank", "effective_rank", "relative_residual"),
        against="tokens within a sequence may differ as before: this is about samples",
        falls=("pooled_rank",),
    ),
    Phenomenon(
        name="dead_tokens",
        summary="A large share of the tokens is zero or equal to another token: they carry nothing.",
        next_step="check the padding mask, and whether the tokens named are padding",
        causes=(
            "padding that the model call does not mark",
            "tokens that are dropped, merged or copied in that block",
            "equal ids without positions",
        ),
        remedies=(
            "pass the padding mask, or drop padding by packing sequences (Krell et al. 2021, arXiv 2107.02027)",
            "merge equal tokens on purpose and save their cost (Bolya et al. 2022, arXiv 2210.09461)",
        ),
        readings=("dead_tokens", "effective_rank", "token_similarity"),
        against="when all tokens are alike it is rank collapse",
        rises=("dead_tokens",),
        falls=("effective_rank",),
    ),
    Phenomenon(
        name="massive_activation",
        summary="A few entries of the stream are thousands of times larger than the others. Large models live with it: it is information.",
        next_step="nothing, unless the model is to be quantised; token cosines are read without the tokens that carry them",
        causes=("the model stores a constant bias in a few channels of one token, often that of an attention sink",),
        remedies=(
            "give attention an explicit bias (Sun et al. 2024, arXiv 2402.17762)",
            "give the model registers to park on (Darcet et al. 2023, arXiv 2309.16588)",
        ),
        readings=("massive_activation", "outlier_tokens", "sink_mass"),
        against="in half precision they can end in values that are not finite",
        rises=("massive_activation", "outlier_tokens"),
    ),
    Phenomenon(
        name="overfitting",
        summary="The validation loss rises while the training loss is far below it. This is not a collapse: no layer has stopped working.",
        next_step="keep the checkpoint with the lowest val_loss",
        causes=("more capacity than data", "training for too long on the same samples"),
        remedies=(
            "regularise: dropout (Hinton et al. 2012, arXiv 1207.0580), weight decay (Loshchilov and Hutter 2017, arXiv 1711.05101)",
            "stop early, or bring more data: any architecture can learn a small set by heart (Zhang et al. 2016, arXiv 1611.03530)",
        ),
        readings=("token_similarity", "attention_uniformity", "gradient_norm"),
        against="all readings of collapse are normal",
    ),
)
