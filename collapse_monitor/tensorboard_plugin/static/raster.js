// Readings to pixels: each screen column shows the worst of all readings that fall into it.

import { colourOf } from "./colours.js";
import { columnOf, worseOf } from "./series.js";

/** A picture `width` pixels wide and one pixel per row high, row 0 at the bottom. What was not read stays transparent. */
export function rasterise(series, scale, range, width, middles) {
  const picture = document.createElement("canvas");
  picture.width = Math.max(1, width);
  picture.height = Math.max(1, series.rows);
  const context = picture.getContext("2d");
  const image = context.createImageData(picture.width, picture.height);
  const worse = worseOf(scale.difference ? null : scale.collapse, middles);
  for (let x = 0; x < picture.width; x++) {
    const span = columnsAt(series, range, x, picture.width);
    if (!span) continue;
    for (let row = 0; row < series.rows; row++) {
      let value = NaN;
      for (let column = span[0]; column < span[1]; column++) value = worse(value, series.values[column * series.rows + row], row);
      if (Number.isNaN(value)) continue;
      const [red, green, blue] = colourOf(scale, value);
      const at = 4 * ((series.rows - 1 - row) * picture.width + x);
      image.data[at] = red;
      image.data[at + 1] = green;
      image.data[at + 2] = blue;
      image.data[at + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
  return picture;
}

// The columns that begin within one pixel; without any the one that still stands there; null outside of the log.
function columnsAt(series, range, x, width) {
  if (!series.columns) return null;
  const size = (range.to - range.from) / width;
  const start = range.from + x * size;
  const end = start + size;
  if (end <= series.first[0]) return null;
  if (start > series.last[series.columns - 1] + (series.tail || 0)) return null;
  const standing = columnOf(series, start);
  let begin = series.first[standing] < start ? standing + 1 : standing;
  const stop = columnOf(series, end) + (series.first[columnOf(series, end)] < end ? 1 : 0);
  if (begin >= stop) begin = standing;
  return [begin, Math.max(stop, begin + 1)];
}
