// Numbers as people read them, and a few statistics that leave out what is not finite.

/** Four digits, and more where a value next to 1 would read as 1. */
export function spell(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not read";
  if (!Number.isFinite(value)) return value > 0 ? "infinite" : "minus infinite";
  const size = Math.abs(value);
  if (size > 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3).replace(/\.?0+e/, "e");
  const text = String(Number(value.toPrecision(4)));
  return text === "1" && value !== 1 ? String(Number(value.toPrecision(7))) : text;
}

export function spellStep(step) {
  return Math.round(step).toLocaleString("en-US").replace(/,/g, "\u202f");
}

/** Steps of a column: one, or from one to another. */
export function spellSteps(first, last) {
  return last > first ? `steps ${spellStep(first)}\u2013${spellStep(last)}` : `step ${spellStep(first)}`;
}

/** Rising numbers with runs shortened: 0-2, 5. */
export function spellRanges(numbers) {
  const runs = [];
  for (const number of numbers) {
    const run = runs[runs.length - 1];
    if (run && run[1] === number - 1) run[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (last > first ? `${first}\u2013${last}` : `${first}`)).join(", ");
}

/** Finite values, rising. */
export function sortedFinite(values) {
  return Float64Array.from(values).filter(Number.isFinite).sort();
}

/** Of rising values the one at a share from 0 to 1; NaN of none. */
export function quantile(sorted, share) {
  return sorted.length ? sorted[Math.round(share * (sorted.length - 1))] : NaN;
}

export function clamp(value, low, high) {
  return Math.max(low, Math.min(high, value));
}
