/* Figures that draw themselves when they are seen: plotly comes with the first of them, one is drawn per frame, and
   each at most every two seconds. Dragging zooms, in all figures over time at once; a double click goes back. */

import {fill, h, set, setText, toast} from "./dom.js";
import {DASH, number} from "./format.js";
import {figureCsv, save} from "./save.js";

const EVERY_MS = 2000;
let loading = null;

function loadPlotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = h("script", {src: "/assets/plotly.js", async: true});
    script.addEventListener("load", () => resolve());
    script.addEventListener("error", () => {
      loading = null;
      script.remove();
      reject(new Error("plotly.js did not load"));
    });
    document.head.append(script);
  });
  return loading;
}

const queue = new Set();
let isDrawing = false;

function enqueue(figure) {
  queue.add(figure);
  if (isDrawing) return;
  isDrawing = true;
  loadPlotly().then(
    () => requestAnimationFrame(drawNext),
    () => {
      isDrawing = false;
      for (const one of queue) one.fail();
      queue.clear();
    },
  );
}

function drawNext() {
  const figure = queue.values().next().value;
  if (!figure) {
    isDrawing = false;
    return;
  }
  queue.delete(figure);
  try {
    figure.drawNow();
  } finally {
    requestAnimationFrame(drawNext); // the others are drawn whatever becomes of this one
  }
}

const figures = new Map(); // element -> Figure
const observer = new IntersectionObserver(
  entries => {
    for (const entry of entries) {
      const figure = figures.get(entry.target);
      if (figure) {
        figure.isVisible = entry.isIntersecting;
        figure.schedule();
      }
    }
  },
  {rootMargin: "200px"},
);

Look.whenThemeChanges(() => {
  for (const figure of figures.values()) {
    figure.isStale = true;
    if (figure.isDrawn) figure.element.dataset.pale = ""; // in the colours of before
    figure.drawSoon();
  }
});

export class Figure {
  constructor({title, hint = "", height = 220, isWide = false, empty = "Nothing measured yet."}) {
    this.value = h("span", {class: "figure-value"});
    this.plot = h("div", {class: "plot", style: {height: `${height}px`}});
    const take = (text, label, onclick) =>
      h("button", {type: "button", class: "take", "aria-label": `${label} of ${title}`, title: label, onclick}, text);
    this.takes = h(
      "span",
      {class: "takes", hidden: true},
      take("CSV", "Numbers as CSV", () => save(`${title}.csv`, figureCsv(this.spec), "text/csv")),
      take("PNG", "Picture as PNG", () => this.savePicture()),
    );
    this.cross = h("div", {class: "crosshair", hidden: true});
    this.note = h("p", {class: "empty figure-empty", style: {height: `${height}px`}}, "Not loaded yet.");
    this.element = h(
      "figure",
      {class: `card${isWide ? " wide" : ""}`, role: "group", "aria-label": title},
      h("figcaption", {}, h("span", {}, title, hint && h("small", {}, hint)), this.value, this.takes),
      this.note,
      h("div", {class: "plot-box"}, this.plot, this.cross),
    );
    Object.assign(this, {
      title,
      empty,
      isVisible: false,
      isStale: false,
      isDrawn: false,
      drawnAt: 0,
      timer: null,
      spec: null,
    });
    this.plot.hidden = true;
    figures.set(this.element, this);
    observer.observe(this.element);
  }

  /* `spec` is {data, layout} as Look.drawFigure takes it; null: nothing to see. `value` is the newest, in words. */
  update(spec, value = "") {
    setText(this.value, value === DASH ? "" : value);
    this.spec = spec;
    this.isDrawn &&= Boolean(spec);
    this.takes.hidden = !this.isDrawn;
    this.note.hidden = this.isDrawn;
    this.plot.hidden = !this.isDrawn;
    setText(this.note, spec ? "Drawing …" : this.empty);
    if (!spec) return;
    set(this.plot, {role: "img", "aria-label": value && value !== DASH ? `${this.title}: now ${value}` : this.title});
    this.isStale = true;
    this.schedule();
  }

  schedule() {
    if (!this.isVisible || !this.isStale || !this.spec || this.timer) return;
    const waitMs = this.drawnAt ? Math.max(0, this.drawnAt + EVERY_MS - performance.now()) : 0;
    this.timer = setTimeout(() => {
      this.timer = null;
      if (this.isVisible && this.isStale) enqueue(this);
    }, waitMs);
  }

  /* Without the pause between drawings. */
  drawSoon() {
    clearTimeout(this.timer);
    this.timer = null;
    this.drawnAt = 0;
    this.schedule();
  }

  drawNow() {
    if (!this.plot.isConnected || !this.spec) return;
    this.isStale = false;
    this.drawnAt = performance.now();
    const isFirst = !this.isDrawn || !this.plot.data;
    this.isDrawn = true;
    this.takes.hidden = false;
    delete this.element.dataset.pale;
    this.note.hidden = true;
    this.plot.hidden = false;
    const drawn = Look.drawFigure(this.plot, {...this.spec, config: {doubleClick: "autosize", ...this.spec.config}});
    if (isFirst)
      drawn.then(() => {
        this.plot.on?.("plotly_relayout", change => zoomAll(this, change));
        this.plot.on?.("plotly_hover", ({xvals}) => crossAll(this, xvals?.[0]));
        this.plot.on?.("plotly_unhover", () => crossAll(this, undefined));
      });
  }

  async savePicture() {
    try {
      const {width, height} = this.plot.getBoundingClientRect();
      await Plotly.downloadImage(this.plot, {format: "png", filename: this.title, width, height, scale: 2});
    } catch (error) {
      toast(`The picture cannot be made: ${error.message}`);
    }
  }

  fail() {
    fill(this.note, "The figure cannot be drawn: plotly.js did not load from the server.");
    this.note.hidden = false;
    this.plot.hidden = true;
  }

  remove() {
    clearTimeout(this.timer);
    queue.delete(this);
    figures.delete(this.element);
    observer.unobserve(this.element);
    if (window.Plotly && this.plot.data) Plotly.purge(this.plot);
  }
}

/* --- zooming and pointing --- */

let isZooming = false;

/* What one figure over time shows, all of them show. */
async function zoomAll(from, change) {
  if (isZooming || from.spec?.layout?.xaxis?.type !== "date") return;
  const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  const wanted = range[0] !== undefined ? {"xaxis.range": range} : change["xaxis.autorange"] ? {"xaxis.autorange": true} : null;
  if (!wanted) return;
  isZooming = true;
  try {
    for (const figure of figures.values())
      if (figure !== from && figure.isDrawn && figure.spec?.layout?.xaxis?.type === "date")
        await Plotly.relayout(figure.plot, wanted);
  } finally {
    isZooming = false;
  }
}

/* The moment that is pointed at in one figure over time is marked in all of them. Undefined: none is. */
function crossAll(from, at) {
  for (const figure of figures.values()) {
    if (figure === from || !figure.isDrawn || !figure.isVisible || figure.spec?.layout?.xaxis?.type !== "date") continue;
    const axis = figure.plot._fullLayout?.xaxis,
      x = at === undefined || !axis ? NaN : axis.d2p(at);
    figure.cross.hidden = !(x >= 0 && x <= axis._length);
    if (!figure.cross.hidden) figure.cross.style.left = `${axis._offset + x}px`;
  }
}

/* --- parts of figures ----------------------------------------------------------------------------------------- */

const timeAxis = () => ({
  type: "date",
  hoverformat: "%d %b %H:%M:%S",
  nticks: innerWidth < 600 ? 4 : 6,
  tickangle: 0,
});

export const line = (x, y, name, colour, more = {}) => ({
  type: "scatter",
  mode: x.length < 3 ? "lines+markers" : "lines",
  x,
  y,
  name,
  connectgaps: false,
  line: {color: colour, width: 2, ...(more.line ?? {})},
  marker: {color: colour, size: 6},
  hovertemplate: `%{y:.4~g}<extra>${name}</extra>`,
  ...Object.fromEntries(Object.entries(more).filter(([key]) => key !== "line")),
});

export function layout(own = {}) {
  const {xaxis, yaxis, ...more} = own;
  return {
    xaxis: xaxis ?? timeAxis(),
    yaxis: {rangemode: "tozero", nticks: 5, fixedrange: true, ...(yaxis ?? {})},
    hovermode: "x unified",
    uirevision: "keep",
    dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false, // a finger scrolls the page
    margin: {l: 40, r: 12, t: 8, b: 28},
    ...more,
  };
}

/* Axes for whole numbers, and for what grows by factors: a few ticks that can be read. */
export function wholeAxis(values) {
  const most = Math.max(1, ...values.filter(Number.isFinite));
  return {rangemode: "tozero", tickformat: "d", ...(most <= 6 ? {dtick: 1} : {nticks: 5})};
}

export function logAxis(values, more = {}) {
  const known = values.filter(value => value > 0),
    low = Math.min(...known),
    high = Math.max(...known);
  const base = high / low > 300 ? 10 : 2,
    ticks = [];
  for (let power = Math.floor(Math.log(low) / Math.log(base)); base ** power <= high * 1.001; power++)
    ticks.push(base ** power);
  const step = Math.ceil(ticks.length / 7),
    shown = ticks.filter((tick, index) => index % step === 0);
  return {type: "log", tickmode: "array", tickvals: shown, ticktext: shown.map(tick => number(tick)), ...more};
}

export const hasNumbers = values => values.some(value => value !== null && value !== undefined);
export const lastOf = values => {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
};
