/* Figures: a chart with its title, newest value, legend and downloads. A figure draws itself when it is in sight.
   Dragging zooms, in all figures over time at once; a double click or Escape goes back. */

import {fill, h, set, setText, toast} from "./dom.js";
import {DASH} from "./format.js";
import {Plot} from "./plot.js";
import {figureCsv, save} from "./save.js";
import {powers} from "./scales.js";

const figures = new Map(); // element -> Figure
const observer = new IntersectionObserver(
  entries => {
    for (const entry of entries) {
      const figure = figures.get(entry.target);
      if (!figure) continue;
      figure.isVisible = entry.isIntersecting;
      figure.draw();
    }
  },
  {rootMargin: "200px"},
);

export class Figure {
  constructor({title, hint = "", height = 220, isWide = false, empty = "Nothing measured yet."}) {
    this.value = h("span", {class: "figure-value"});
    this.legend = h("div", {class: "plot-legend", hidden: true});
    this.plot = new Plot({
      label: title,
      height,
      onZoom: window => zoomAll(this, window),
      onPoint: at => crossAll(this, at),
    });
    const take = (text, label, onclick) =>
      h("button", {type: "button", class: "take", "aria-label": `${label} of ${title}`, title: label, onclick}, text);
    this.takes = h(
      "span",
      {class: "takes", hidden: true},
      take("CSV", "Numbers as CSV", () => save(`${title}.csv`, figureCsv(this.spec), "text/csv")),
      take("PNG", "Picture as PNG", () => this.savePicture()),
    );
    this.note = h("p", {class: "empty figure-empty", style: {height: `${height}px`}}, "Not loaded yet.");
    this.element = h(
      "figure",
      {class: `card${isWide ? " wide" : ""}`, role: "group", "aria-label": title},
      h("figcaption", {}, h("span", {}, title, hint && h("small", {}, hint)), this.value, this.takes),
      this.note,
      this.legend,
      this.plot.element,
    );
    Object.assign(this, {title, empty, isVisible: false, isStale: false, spec: null});
    this.plot.element.hidden = true;
    figures.set(this.element, this);
    observer.observe(this.element);
  }

  /* `spec` is {data, layout} as Plot takes it; null: nothing to see. `value` is the newest, in words. */
  update(spec, value = "") {
    setText(this.value, value === DASH ? "" : value);
    this.spec = spec;
    this.label = value && value !== DASH ? `${this.title}: now ${value}` : this.title;
    this.takes.hidden = this.plot.element.hidden = !spec;
    this.note.hidden = Boolean(spec);
    setText(this.note, this.empty);
    this.legend.hidden = !spec?.layout.showlegend;
    this.isStale = Boolean(spec);
    this.draw();
  }

  draw() {
    if (!this.isVisible || !this.isStale) return;
    this.isStale = false;
    this.plot.update(this.spec, this.label);
    this.updateLegend();
  }

  /* A click on a name hides its curve. */
  updateLegend() {
    const named = this.legend.hidden ? [] : this.spec.data.filter(trace => !trace.isQuiet && trace.showlegend !== false),
      mark = JSON.stringify(named.map(trace => [trace.name, trace.line, trace.marker?.symbol, trace.marker?.color]));
    if (mark === this.legendMark) return;
    this.legendMark = mark;
    fill(
      this.legend,
      named.map(trace =>
        h(
          "button",
          {
            type: "button",
            class: "plot-key",
            "aria-pressed": String(!this.plot.hidden.has(trace.name)),
            onclick: event => {
              const {hidden} = this.plot;
              if (!hidden.delete(trace.name)) hidden.add(trace.name);
              set(event.currentTarget, {"aria-pressed": String(!hidden.has(trace.name))});
              this.plot.canvas.ask();
            },
          },
          keyOf(trace),
          h("span", {}, trace.name),
        ),
      ),
    );
  }

  async savePicture() {
    const picture = await this.plot.picture(this.title);
    if (picture) save(`${this.title}.png`, picture);
    else toast("The browser cannot make the picture.");
  }

  remove() {
    figures.delete(this.element);
    observer.unobserve(this.element);
    this.plot.remove();
  }
}

const SYMBOLS = {circle: "●", square: "■", diamond: "◆", "triangle-up": "▲", x: "✕", cross: "✚", star: "★", pentagon: "⬟"};
const variableOf = colour => `var(--${/^@\d/.test(colour) ? "c" : ""}${colour.slice(1)})`;

/* How a trace looks, beside its name in the legend. */
function keyOf(trace) {
  if (trace.type === "bar" || !trace.mode.includes("lines"))
    return h(
      "span",
      {class: "plot-symbol", style: {color: variableOf(trace.marker.color)}, "aria-hidden": "true"},
      SYMBOLS[trace.marker.symbol ?? (trace.type === "bar" ? "square" : "circle")],
    );
  const style = {solid: "solid", dot: "dotted"}[trace.line.dash ?? "solid"] ?? "dashed";
  return h("span", {class: "plot-line", style: {"border-top": `2px ${style} ${variableOf(trace.line.color)}`}, "aria-hidden": "true"});
}

/* --- zooming and pointing --- */

const isOverTime = figure => figure.spec?.layout.xaxis.type === "date";

/* What one figure over time shows, all of them show. */
function zoomAll(from, window) {
  for (const figure of isOverTime(from) ? [...figures.values()].filter(isOverTime) : [from]) figure.plot.zoom(window);
}

/* The moment that is pointed at in one figure over time is marked in all of them. Null: none is. */
function crossAll(from, at) {
  if (!isOverTime(from)) return;
  for (const figure of figures.values()) if (figure !== from && isOverTime(figure)) figure.plot.mark(at);
}

/* --- parts of figures ----------------------------------------------------------------------------------------- */

export const line = (x, y, name, colour, more = {}) => ({
  mode: x.length < 3 ? "lines+markers" : "lines",
  x,
  y,
  name,
  marker: {color: colour, size: 6},
  ...more,
  line: {color: colour, width: 2, ...more.line},
});

/* Points. `tell(index)` says more of one than where it is. */
export const dots = (x, y, name, marker, more = {}) => ({mode: "markers", x, y, name, marker, ...more});

export const bars = (x, y, name, marker, more = {}) => ({type: "bar", x, y, name, marker, ...more});

export const layout = ({yaxis, ...own} = {}) => ({
  xaxis: {type: "date"},
  hover: "x",
  ...own,
  yaxis: {rangemode: "tozero", ...yaxis},
});

/* Axes for whole numbers, and for what grows by factors: a few ticks that can be read. */
export function wholeAxis(values) {
  const most = Math.max(1, ...values.filter(Number.isFinite));
  return {rangemode: "tozero", ...(most <= 6 ? {dtick: 1} : {})};
}

export function logAxis(values, more = {}) {
  const known = values.filter(value => value > 0);
  return {type: "log", tickvals: powers(Math.min(...known) / 2, Math.max(...known) * 2), ...more};
}

export const hasNumbers = values => values.some(value => value !== null && value !== undefined);
export const lastOf = values => {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
};
