// The keys of a heat map. A step moves to the next reading, not by a number of steps.

import { clamp } from "./numbers.js";
import { columnOf } from "./series.js";

const PAGE = 10;

/** `act` holds `choose(step, row)`, `zoomBy(factor)`, `zoomOut()` and `nextAlert(direction)`; `look()` tells series and selection. */
export function listenToKeys(element, look, act) {
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (press(event.key, look(), act)) event.preventDefault();
  });
}

function press(key, { series, step, row }, act) {
  if (key === "+" || key === "=") act.zoomBy(0.5);
  else if (key === "-") act.zoomBy(2);
  else if (key === "0") act.zoomOut();
  else if (key === "n") act.nextAlert(1);
  else if (key === "p") act.nextAlert(-1);
  else {
    if (!series || !series.columns) return false;
    const moves = {
      ArrowLeft: [-1, 0],
      ArrowRight: [1, 0],
      PageUp: [-PAGE, 0],
      PageDown: [PAGE, 0],
      ArrowUp: [0, 1],
      ArrowDown: [0, -1],
      Home: [-Infinity, 0],
      End: [Infinity, 0],
    };
    if (!(key in moves)) return false;
    const [sideways, upwards] = moves[key];
    // The first key chooses where one stands, the next ones walk.
    const isNew = step === null || row === null;
    const column = step === null ? series.columns - 1 : columnOf(series, step);
    const next = isNew && Number.isFinite(sideways) ? column : clamp(column + sideways, 0, series.columns - 1);
    act.choose(series.first[next], clamp((row ?? 0) + (isNew ? 0 : upwards), 0, series.rows - 1));
  }
  return true;
}
