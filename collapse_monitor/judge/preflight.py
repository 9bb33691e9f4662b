"""What the first snapshot of a model says before it has learnt anything: what theory predicts of it, and what is wrong already."""

from __future__ import annotations

import math

from collapse_monitor.judge.diagnosis import diagnose, explain, undecided
from collapse_monitor.judge.laws import depth_law
from collapse_monitor.records import Severity, Snapshot


def preflight(snapshot: Snapshot) -> str:
    """Similarity over depth, the gradients of queries and keys, whether deep layers start out collapsed, and the diagnosis, as text."""
    lines = ["Preflight: the model as it is before training."]
    similarity = _ends(snapshot, "token_similarity")
    if similarity is not None:
        first, last = similarity
        lines.append(
            f"- Tokens: mean cosine {first:.3g} behind the first block, {last:.3g} behind the last; {depth_law(snapshot).sentence}."
        )
    else:
        lines.append("- Tokens: token_similarity was not read.")
    ratio = _ends(snapshot, "qk_to_v_gradient")
    if ratio is not None:
        first, last = ratio
        lines.append(
            f"- Gradients of queries over those of values: {first:.3g} in the first block, {last:.3g} in the last. "
            "They fall with the square of the residual in front of a block (Noci et al. 2022)."
        )
    else:
        lines.append("- Gradients of queries and keys: not read; where tokens start out alike they are small (Noci et al. 2022).")
    found = diagnose(snapshot)
    wrong = [finding for finding in found if finding.severity is not Severity.INFO]
    collapsed = [finding for finding in wrong if finding.phenomenon == "rank_collapse"]
    if collapsed:
        lines.append(
            f"- Collapsed from the start: layers {', '.join(map(str, collapsed[0].layers))}. Training cannot be expected to undo it."
        )
    else:
        lines.append("- No layer starts out collapsed.")
    lines.append(explain(wrong) if wrong else "Nothing is wrong with it.")
    notes = [finding for finding in found if finding.severity is Severity.INFO]
    if notes:
        lines.append(
            "True of it, and no fault by itself: " + ", ".join(f"{note.phenomenon} (layers {_spelt(note.layers)})" for note in notes) + "."
        )
    blind = undecided(snapshot)
    if blind:
        lines.append("Not looked for: " + ", ".join(blind) + " (" + "; ".join(dict.fromkeys(blind.values())) + ").")
    return "\n".join(lines)


def _ends(snapshot: Snapshot, metric: str) -> tuple[float, float] | None:
    if metric not in snapshot.metrics:
        return None
    known = [value for value in snapshot.series(metric) if not math.isnan(value)]
    return (known[0], known[-1]) if known else None


def _spelt(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
