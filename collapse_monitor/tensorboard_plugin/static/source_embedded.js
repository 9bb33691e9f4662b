// Readings that the page carries with it: one compressed block per run and metric, unpacked when it is first looked at.

import { decodeSeries } from "./decode.js";

export function embeddedSource() {
  const index = JSON.parse(document.getElementById("index").textContent);
  const unpacked = new Map();
  const series = (key) => {
    if (!unpacked.has(key)) unpacked.set(key, unpack(key));
    return unpacked.get(key);
  };
  return {
    index: async () => index,
    series: (run, metric) => series(`series/${numberOf(index, run)}/${metric}`),
    heads: async (run, metric, layer) => headsOf(await series(`heads/${numberOf(index, run)}/${metric}`), layer),
    alerts: async (run) => index.runs[numberOf(index, run)].alerts,
  };
}

function numberOf(index, run) {
  return index.runs.findIndex((candidate) => candidate.name === run);
}

async function unpack(key) {
  const block = document.getElementById(key);
  if (!block) throw new Error(`the report holds no ${key}`);
  const bytes = Uint8Array.from(atob(block.textContent.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return decodeSeries(await new Response(stream).arrayBuffer());
}

// All heads of all layers are in one block; a layer's are the rows that carry its number.
function headsOf(whole, layer) {
  const rows = whole.layers.flatMap((owner, row) => (owner === layer ? [row] : []));
  const values = new Float32Array(whole.columns * rows.length);
  for (let column = 0; column < whole.columns; column++) {
    rows.forEach((row, index) => (values[column * rows.length + index] = whole.values[column * whole.rows + row]));
  }
  return { ...whole, rows: rows.length, values, labels: rows.map((row) => whole.labels[row]) };
}
