// From a value to a colour. Both maps keep their order for every kind of colour blindness and in grey.

import { clamp, quantile, sortedFinite, spell } from "./numbers.js";

// viridis (van der Walt and Smith, CC0)
const ORDERED = [
  [68, 1, 84],
  [72, 36, 117],
  [65, 68, 135],
  [53, 95, 141],
  [42, 120, 142],
  [33, 145, 140],
  [34, 168, 132],
  [68, 191, 112],
  [122, 209, 81],
  [189, 223, 38],
  [253, 231, 37],
];
const DIVERGING = [
  [5, 72, 140],
  [67, 147, 195],
  [173, 208, 229],
  [245, 245, 242],
  [250, 200, 130],
  [224, 130, 20],
  [150, 70, 5],
];
export const INFINITE = [214, 0, 122];
const SAMPLED = 60000;

/** Where values lie between two ends, and their colour. The bright end means collapse, whichever end of the metric that is. */
export function orderedScale(seriesList, about, whole) {
  const sorted = sortedFinite(sampleOf(seriesList));
  let low = quantile(sorted, whole ? 0 : 0.01);
  let high = quantile(sorted, whole ? 1 : 0.99);
  if (!sorted.length) [low, high] = [0, 1];
  const logarithmic = sorted.length > 0 && low > 0 && high / low > 50;
  if (high <= low) [low, high] = [low - (Math.abs(low) || 1) * 0.05, low + (Math.abs(low) || 1) * 0.05];
  const of = logarithmic ? Math.log : (value) => value;
  const start = of(low);
  const span = of(high) - start;
  const flipped = about.collapse === "low";
  return {
    low,
    high,
    logarithmic,
    flipped,
    whole,
    collapse: about.collapse,
    table: tableOf(ORDERED, flipped),
    position: (value) => clamp((of(Math.max(value, logarithmic ? 1e-300 : -Infinity)) - start) / span, 0, 1),
  };
}

/** Differences of two runs around zero; the warm end means that the first run is nearer to collapse. */
export function differenceScale(series, about) {
  const sizes = sortedFinite(series.values).map(Math.abs).sort();
  const high = quantile(sizes, 0.99) || 1e-12;
  const flipped = about.collapse === "low";
  return {
    low: -high,
    high,
    logarithmic: false,
    flipped,
    difference: true,
    collapse: about.collapse,
    table: tableOf(DIVERGING, flipped),
    position: (value) => clamp(0.5 + value / high / 2, 0, 1),
  };
}

/** What the colour bar says of its two ends. */
export function describeEnds(scale, names = []) {
  if (scale.difference) {
    const [first, second] = scale.collapse
      ? [`${names[0]} nearer to collapse`, `${names[1]} nearer to collapse`]
      : [`${names[0]} higher`, `${names[1]} higher`];
    return scale.flipped ? [first, second] : [second, first];
  }
  if (!scale.collapse) return ["low", "high"];
  return scale.flipped ? ["towards collapse", "away from it"] : ["away from it", "towards collapse"];
}

export function describeScale(scale) {
  const clipped = scale.whole ? "smallest to largest" : scale.difference ? "99 % of differences" : "1\u201399 % of values";
  const direction = scale.difference ? "" : scale.collapse ? `; the ${scale.collapse} end is collapse` : "; neither end alone is collapse";
  return `${spell(scale.low)} to ${spell(scale.high)}${scale.logarithmic ? ", logarithmic" : ""} (${clipped})${direction}`;
}

export function colourOf(scale, value) {
  if (!Number.isFinite(value)) return INFINITE;
  const index = 3 * Math.round(scale.position(value) * 255);
  return [scale.table[index], scale.table[index + 1], scale.table[index + 2]];
}

/** The map as a strip, low end left. */
export function drawColourBar(canvas, scale) {
  canvas.width = 256;
  canvas.height = 1;
  const context = canvas.getContext("2d");
  const image = context.createImageData(256, 1);
  for (let index = 0; index < 256; index++) {
    image.data.set([scale.table[3 * index], scale.table[3 * index + 1], scale.table[3 * index + 2], 255], 4 * index);
  }
  context.putImageData(image, 0, 0);
}

function tableOf(anchors, flipped) {
  const table = new Uint8Array(3 * 256);
  for (let index = 0; index < 256; index++) {
    const at = ((flipped ? 255 - index : index) / 255) * (anchors.length - 1);
    const below = Math.min(Math.floor(at), anchors.length - 2);
    for (let part = 0; part < 3; part++)
      table[3 * index + part] = anchors[below][part] + (at - below) * (anchors[below + 1][part] - anchors[below][part]);
  }
  return table;
}

// Sorting a sample is enough for percentiles, but the ends of the whole range need every value.
function sampleOf(seriesList) {
  const found = [];
  for (const { values } of seriesList) {
    const stride = Math.max(1, Math.floor(values.length / SAMPLED));
    let low = Infinity;
    let high = -Infinity;
    for (let index = 0; index < values.length; index++) {
      const value = values[index];
      if (!Number.isFinite(value)) continue;
      if (index % stride === 0) found.push(value);
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (low <= high) found.push(low, high);
  }
  return found;
}
