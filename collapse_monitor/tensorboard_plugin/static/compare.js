// Two runs: their difference where both have a reading of the same step and layer.

/** First minus second, on the steps that both kept. */
export function differenceOf(first, second) {
  const rows = Math.min(first.rows, second.rows);
  const pairs = [];
  for (let a = 0, b = 0; a < first.columns && b < second.columns;) {
    if (first.first[a] < second.first[b]) a++;
    else if (first.first[a] > second.first[b]) b++;
    else pairs.push([a++, b++]);
  }
  const values = new Float32Array(pairs.length * rows);
  pairs.forEach(([a, b], column) => {
    for (let row = 0; row < rows; row++)
      values[column * rows + row] = first.values[a * first.rows + row] - second.values[b * second.rows + row];
  });
  const steps = Float64Array.from(pairs, ([a]) => first.first[a]);
  const last = Float64Array.from(pairs, ([a, b]) => Math.max(first.last[a], second.last[b]));
  return { first: steps, last, values, columns: pairs.length, rows, kept: pairs.length };
}
