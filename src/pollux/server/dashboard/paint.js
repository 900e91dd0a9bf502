/* Jobs' colours and patterns, on canvases and in the page. */

import {h, set} from "./dom.js";
import {styleOf} from "./store.js";

let theme = {};
const tiles = new Map();
let isStale = true;
const canvases = new Set();
Look.whenThemeChanges(() => {
  isStale = true;
  for (const canvas of canvases) canvas.ask();
});

/* The look's colours as they are now. */
export function colours() {
  if (isStale) {
    const names = ["bg", "card", "ink", "muted", "line", "grid", "accent", "c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];
    theme = Object.fromEntries(names.map(name => [name, Look.css(`--${name}`)]));
    tiles.clear();
    isStale = false;
  }
  return theme;
}

/* A colour by its name in figures: "@0" is the first of the palette, "@muted" the look's own. */
export const colourOf = name => colours()[/^@\d/.test(name) ? `c${name.slice(1)}` : name.slice(1)];

/* What to fill with on a canvas for a job. */
export function fillOf(context, name) {
  const {colour, pattern} = styleOf(name);
  return tileOf(context, colours()[colour.slice(2)], pattern);
}

export function tileOf(context, base, pattern) {
  if (pattern === "solid") return base;
  const key = `${base}/${pattern}`;
  let tile = tiles.get(key);
  if (!tile) tiles.set(key, (tile = makeTile(base, pattern)));
  return context.createPattern(tile, "repeat");
}

function makeTile(base, pattern) {
  const size = 8,
    tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const context = tile.getContext("2d");
  context.fillStyle = base;
  context.fillRect(0, 0, size, size);
  context.strokeStyle = context.fillStyle = colours().card;
  context.globalAlpha = 0.75;
  context.lineWidth = 2;
  context.beginPath();
  if (pattern === "stripes")
    for (const from of [-size, 0, size]) {
      context.moveTo(from, size);
      context.lineTo(from + size, 0);
    }
  if (pattern === "rungs") {
    context.moveTo(0, 2);
    context.lineTo(size, 2);
  }
  context.stroke();
  if (pattern === "dots")
    for (const [x, y] of [
      [2, 2],
      [6, 6],
    ]) {
      context.beginPath();
      context.arc(x, y, 1.4, 0, 7);
      context.fill();
    }
  return tile;
}

/* A small square in the job's colour and pattern. */
export function swatch(name) {
  const {colour, pattern} = styleOf(name);
  return h("span", {class: `swatch ${pattern}`, style: {"--swatch": `var(${colour})`}, "aria-hidden": "true"});
}

export const jobLink = name =>
  h("a", {class: "job-link", href: `#/jobs/${encodeURIComponent(name)}`}, swatch(name), h("span", {}, name));

/* A canvas as large as its place, sharp on every screen; `draw(context, width, height)` in its own units. */
export class Canvas {
  constructor(attributes, draw) {
    this.element = h("canvas", attributes);
    this.draw = draw;
    this.height = 0;
    this.isAsked = false;
    this.observer = new ResizeObserver(() => this.ask());
    this.observer.observe(this.element);
    canvases.add(this);
  }

  setHeight(height) {
    if (this.height === height) return;
    this.height = height;
    this.element.style.height = `${height}px`;
  }

  /* In the next frame, however often it is asked for. */
  ask() {
    if (this.isAsked) return;
    this.isAsked = true;
    requestAnimationFrame(() => {
      this.isAsked = false;
      this.now();
    });
  }

  now() {
    const width = this.element.clientWidth,
      height = this.height;
    if (!width || !height || !this.element.isConnected) return;
    const ratio = Math.min(window.devicePixelRatio || 1, 3);
    if (this.element.width !== Math.round(width * ratio) || this.element.height !== Math.round(height * ratio))
      set(this.element, {width: Math.round(width * ratio), height: Math.round(height * ratio)});
    const context = this.element.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.draw(context, width, height);
  }

  remove() {
    canvases.delete(this);
    this.observer.disconnect();
  }
}

/* Text that fits; the middle of a long one is left out, as names differ at both ends. */
export function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let keep = Math.max(1, Math.floor((text.length * width) / context.measureText(text).width) - 1);
  for (; keep > 1; keep--) {
    const cut = `${text.slice(0, Math.ceil(keep / 2))}…${text.slice(text.length - Math.floor(keep / 2))}`;
    if (context.measureText(cut).width <= width) return cut;
  }
  return "…";
}
