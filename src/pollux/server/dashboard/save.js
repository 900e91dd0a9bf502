/* What the user takes along: a table as CSV, a text, a picture. */

import {h} from "./dom.js";

/* A file as the browser's own download. */
export function save(name, content, type = "text/plain") {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], {type: `${type};charset=utf-8`})),
    link = h("a", {href: url, download: name.replaceAll(/[^\w.-]+/g, "-")});
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

/* A cell as spreadsheets read it: quoted where it must be, and no text that begins like a formula. */
const cell = value => {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t]/.test(String(value)) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

export const toCsv = rows => rows.map(row => row.map(cell).join(",")).join("\r\n") + "\r\n";

/* The curves of a figure: one row for each point, the time as ISO where the axis is one of time. */
export function figureCsv({data, layout}) {
  const isTime = layout?.xaxis?.type === "date",
    rows = [["curve", isTime ? "time" : "x", "y"]];
  for (const trace of data)
    for (const [index, x] of (trace.x ?? []).entries())
      rows.push([
        trace.name ?? "",
        isTime && typeof x === "number" ? new Date(x).toISOString().slice(0, 19) : x,
        trace.y?.[index] ?? null,
      ]);
  return toCsv(rows);
}
