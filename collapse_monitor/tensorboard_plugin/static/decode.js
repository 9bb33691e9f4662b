// Columns of readings as they come over the wire or out of the report: a header in JSON, then arrays.

/** { first, last: steps of each column; values: [column, row]; columns, rows, kept, labels } */
export function decodeSeries(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const count = header.columns;
  const start = 4 + size;
  const first = new Float64Array(buffer, start, count);
  const last = new Float64Array(buffer, start + 8 * count, count);
  const cells = count * header.rows;
  const at = start + 16 * count;
  const values =
    header.encoding === "q12" ? dequantise(new Uint8Array(buffer, at, 2 * cells), header) : new Float32Array(buffer, at, cells);
  return { ...header, first, last, values };
}

// 12 bits between the smallest and the largest value, differences between columns, low and high bytes apart.
function dequantise(bytes, { rows, columns, low, high, logarithmic }) {
  const cells = rows * columns;
  const values = new Float32Array(cells);
  const codes = new Uint16Array(rows);
  for (let index = 0; index < cells; index++) {
    const row = index % rows;
    const code = (codes[row] + bytes[index] + 256 * bytes[cells + index]) & 4095;
    codes[row] = code;
    if (code === 4095) values[index] = NaN;
    else if (code >= 4093) values[index] = code === 4094 ? Infinity : -Infinity;
    else {
      const value = low + ((high - low) * code) / 4092;
      values[index] = logarithmic ? Math.exp(value) : value;
    }
  }
  return values;
}
