// The heat maps of the view: of one or two runs, of their difference, of a layer's heads; and their keys.

import { Heatmap } from "./heatmap.js";
import { listenToKeys } from "./keyboard.js";
import { heightOf } from "./panels.js";

const NAMES = ["first", "second"];
const HIGHEST_ALONE = 440;
const HIGHEST_OF_TWO = 300;

/** The map of the run, number 0, or of the one it is compared with. */
export function makeLayerMap(view, number) {
  const map = new Heatmap({
    name: NAMES[number],
    label: "Readings by layer and step. Arrow keys choose a cell, plus and minus zoom, n goes to the next alert.",
    tell: (step, row) => view.tell(number, step, row),
    choose: (step, row) => view.choose(step, row),
    zoom: (from, to) => view.zoom(from, to),
    hover: (step) => view.maps.forEach((other) => other !== map && other.point(step)),
  });
  const look = () => ({ series: view.data && view.shown(number), step: view.state.step, row: view.state.layer });
  listenToKeys(map.front, look, keysOf(view));
  return map;
}

export function makeHeadMap(view) {
  const choose = (step, row) => view.chooseHead(step, row);
  const map = new Heatmap({
    name: "heads",
    label: "Heads of the chosen layer over steps. Arrow keys choose a head and a step.",
    tell: (step, row) => view.tellHead(step, row),
    choose,
    zoom: (from, to) => view.zoom(from, to),
  });
  const look = () => ({ series: view.data && view.data.heads, step: view.state.step, row: view.head });
  listenToKeys(map.front, look, { ...keysOf(view), choose });
  return map;
}

/** `shown` holds the series of one or two runs, or their difference. */
export function drawMaps(view, shown, range) {
  const { data, state } = view;
  const difference = view.isDifference();
  const height = heightOf(Math.max(...shown.map(({ rows }) => rows)), shown.length > 1 ? HIGHEST_OF_TWO : HIGHEST_ALONE);
  view.maps.forEach((map, number) => {
    const series = shown[number];
    map.element.hidden = !series;
    if (!series) return;
    map.element.dataset.run = data.other && !difference ? data.names[number] : "";
    map.draw({
      series,
      scale: view.scale,
      range,
      middles: series.middles,
      marks: difference ? [] : marksOf(data.alerts[number] || []),
      selection: { step: state.step, row: state.layer },
      colours: view.colours,
      height,
    });
  });
}

// Where alerts began, at the first of their layers.
function marksOf(alerts) {
  const placed = alerts.filter(({ state, layers }) => state === "firing" && layers.length);
  return placed.map(({ step, layers, severity }) => ({ step, row: layers[0], severity }));
}

function keysOf(view) {
  return {
    choose: (step, row) => view.choose(step, row),
    zoomBy: (factor) => view.zoomBy(factor),
    zoomOut: () => view.zoom(null, null),
    nextAlert: (direction) => view.nextAlert(direction),
  };
}
