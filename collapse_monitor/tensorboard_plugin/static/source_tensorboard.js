// Readings from the routes that the plugin serves.

import { decodeSeries } from "./decode.js";

export function tensorboardSource() {
  return {
    index: async () => (await get("index", {})).json(),
    series: async (run, metric, from, to) => decodeSeries(await (await get("series", { run, metric, from, to })).arrayBuffer()),
    heads: async (run, metric, layer) => decodeSeries(await (await get("heads", { run, metric, layer })).arrayBuffer()),
    alerts: async (run) => (await get("alerts", { run })).json(),
  };
}

async function get(route, parameters) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined));
  // Relative to the page's base, which holds whatever --path_prefix put in front.
  const response = await fetch(`${route}?${query}`);
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Error(said.error || `TensorBoard answered ${response.status} to ${route}`);
}
