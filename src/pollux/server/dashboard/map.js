/* The map: every node with its slots, coloured by the job that has them. One canvas, however many there are. */

import {announce, h, refill, set, tip} from "./dom.js";
import {byName, plural} from "./format.js";
import {nodeState} from "./nodes.js";
import {Canvas, colours, fillOf, fitted, jobLink} from "./paint.js";
import {store} from "./store.js";

const CELLS = [40, 34, 28, 24, 20, 17, 14, 12, 10, 8, 7, 6, 5];
const MOST_HEIGHT = 340,
  SLOTS_PER_ROW = 16,
  MOST_IN_LEGEND = 18;

export class NodeMap {
  /* `openJob(name)` and `openNode(name)` */
  constructor({openJob, openNode}) {
    Object.assign(this, {openJob, openNode, names: [], nodes: [], cursor: null, hovered: null, shape: null});
    this.canvas = new Canvas(
      {
        class: "map",
        tabindex: "0",
        role: "application",
        "aria-roledescription": "map",
        "aria-label": "Map of nodes and slots. Arrow keys move; Enter opens the job, Space the node.",
      },
      (...args) => this.draw(...args),
    );
    this.legend = h("div", {class: "chips legend"});
    this.empty = h("p", {class: "empty"}, "The cluster has no nodes now.");
    this.element = h("div", {}, this.canvas.element, this.legend, this.empty);
    this.listen(this.canvas.element);
  }

  update() {
    if (this.names.length !== store.nodes.size || !this.names.every(name => store.nodes.has(name)))
      this.names = [...store.nodes.keys()].sort(byName);
    const under = this.nodes[this.cursor?.index]; // the cursor stays with its node
    this.nodes = this.names.map(name => store.nodes.get(name));
    this.slots = new Map();
    if (under) {
      const index = this.names.indexOf(under.name);
      this.moveTo(index < 0 ? Math.min(this.cursor.index, this.nodes.length - 1) : index, this.cursor.slot);
    }
    this.canvas.element.hidden = this.legend.hidden = !this.nodes.length;
    this.empty.hidden = this.nodes.length > 0;
    this.place();
    this.canvas.ask();
    this.updateLegend();
  }

  /* Who has which slot. Jobs in the order of their names: none moves because another one came. */
  slotsOf(node) {
    let slots = this.slots.get(node.name);
    if (!slots) {
      slots = [...node.jobs]
        .sort((a, b) => byName(a.name, b.name))
        .flatMap(job => Array(job.num_replicas).fill(job.name));
      this.slots.set(node.name, slots);
    }
    return slots;
  }

  /* The largest cells with which it is not too high. */
  place() {
    const width = this.canvas.element.clientWidth || 800;
    const most = Math.max(1, ...this.nodes.map(node => node.num_slots));
    const wide = Math.min(most, SLOTS_PER_ROW),
      lines = Math.ceil(most / SLOTS_PER_ROW);
    for (const cell of CELLS) {
      const gap = cell >= 10 ? 2 : 1,
        hasLabels = cell >= 14;
      const tile = Math.max(wide * (cell + gap), hasLabels ? 64 : 0) + (hasLabels ? 14 : 5);
      const row = lines * (cell + gap) + (hasLabels ? 30 : cell >= 8 ? 6 : 3);
      const columns = Math.max(1, Math.floor((width + 8) / tile));
      const height = Math.ceil(this.nodes.length / columns) * row + 4;
      this.shape = {cell, gap, hasLabels, tile, row, columns, wide, width};
      if (height <= MOST_HEIGHT || cell === CELLS.at(-1)) {
        this.canvas.setHeight(height);
        break;
      }
    }
  }

  draw(context, width) {
    if (this.shape?.width !== width) this.place();
    const {cell, hasLabels} = this.shape,
      paint = colours(),
      fills = new Map();
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "top";
    this.nodes.forEach((node, index) => {
      const slots = this.slotsOf(node),
        [left, top] = this.corner(index),
        isOut = node.is_draining || node.is_leaving;
      if (hasLabels) {
        context.fillStyle = paint.muted;
        const label = isOut ? `${node.name} · ${nodeState(node)}` : node.name,
          room = this.shape.tile - 14;
        // Where there is no room for both, the hatching says it.
        const shown = context.measureText(label).width <= room ? label : fitted(context, node.name, room);
        context.fillText(shown, left, top - 18);
      }
      for (let slot = 0; slot < node.num_slots; slot++) {
        const [x, y] = this.slotCorner(left, top, slot),
          job = slots[slot];
        if (job && !fills.has(job)) fills.set(job, fillOf(context, job));
        context.fillStyle = job ? fills.get(job) : paint.grid;
        if (cell >= 14) {
          context.beginPath();
          context.roundRect(x, y, cell, cell, 4);
          context.fill();
        } else context.fillRect(x, y, cell, cell);
        if (!job && cell >= 14) {
          context.strokeStyle = paint.line;
          context.lineWidth = 1;
          context.stroke();
        }
        if (isOut) hatch(context, x, y, cell, paint.ink);
      }
    });
    context.lineWidth = 2;
    for (const [place, colour] of [
      [this.hovered, paint.muted],
      [this.cursor, paint.accent],
    ]) {
      if (
        !place ||
        !this.nodes[place.index] ||
        (place === this.cursor && document.activeElement !== this.canvas.element)
      )
        continue;
      const [x, y] = this.slotCorner(...this.corner(place.index), place.slot);
      context.strokeStyle = colour;
      context.strokeRect(x - 1, y - 1, cell + 2, cell + 2);
    }
  }

  corner(index) {
    const {tile, row, columns, hasLabels} = this.shape;
    return [2 + (index % columns) * tile, 2 + Math.floor(index / columns) * row + (hasLabels ? 20 : 0)];
  }

  slotCorner(left, top, slot) {
    const {cell, gap, wide} = this.shape;
    return [left + (slot % wide) * (cell + gap), top + Math.floor(slot / wide) * (cell + gap)];
  }

  /* {index, slot} under a point; slot is null on a node's name. */
  at(x, y) {
    const {tile, row, columns, cell, gap, wide, hasLabels} = this.shape ?? {};
    if (!tile) return null;
    const column = Math.floor(x / tile),
      line = Math.floor(y / row),
      index = line * columns + column;
    if (column >= columns || index < 0 || index >= this.nodes.length) return null;
    const [left, top] = this.corner(index);
    if (hasLabels && y < top) return {index, slot: null};
    const slot = Math.floor((y - top) / (cell + gap)) * wide + Math.floor((x - left) / (cell + gap));
    return x >= left && x < left + wide * (cell + gap) && slot >= 0 && slot < this.nodes[index].num_slots
      ? {index, slot}
      : null;
  }

  listen(element) {
    const find = event => {
      const box = element.getBoundingClientRect();
      return this.at(event.clientX - box.left, event.clientY - box.top);
    };
    element.addEventListener("pointermove", event => {
      const place = find(event);
      element.style.cursor = place ? "pointer" : "";
      if (place?.index !== this.hovered?.index || place?.slot !== this.hovered?.slot) {
        this.hovered = place?.slot === null ? null : place;
        this.canvas.ask();
      }
      if (place && event.pointerType !== "touch") tip.show(this.words(place), event.clientX, event.clientY);
      else tip.hide();
    });
    element.addEventListener("pointerleave", () => {
      this.hovered = null;
      tip.hide();
      this.canvas.ask();
    });
    element.addEventListener("click", event => {
      const place = find(event);
      if (!place) return;
      tip.hide();
      // With a finger there is no hovering: the node's box says what the hint would.
      this.open(place, event.shiftKey || event.pointerType === "touch");
    });
    element.addEventListener("focus", () => {
      this.cursor ??= {index: 0, slot: 0};
      if (element.matches(":focus-visible")) this.tell();
      this.canvas.ask();
    });
    element.addEventListener("blur", () => {
      tip.hide();
      this.canvas.ask();
    });
    element.addEventListener("keydown", event => this.press(event));
  }

  moveTo(index, slot) {
    this.cursor = this.nodes[index] ? {index, slot: Math.min(slot, this.lastSlot(index))} : null;
  }

  lastSlot(index) {
    return Math.max(0, (this.nodes[index]?.num_slots ?? 1) - 1);
  }

  press(event) {
    if (!this.cursor) return;
    const {columns} = this.shape,
      last = at => this.lastSlot(at);
    let {index, slot} = this.cursor;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      tip.hide();
      this.open(this.cursor, event.key === " ");
      return;
    }
    if (event.key === "ArrowRight") [index, slot] = slot < last(index) ? [index, slot + 1] : [index + 1, 0];
    else if (event.key === "ArrowLeft") [index, slot] = slot > 0 ? [index, slot - 1] : [index - 1, last(index - 1)];
    else if (event.key === "ArrowDown") index += columns;
    else if (event.key === "ArrowUp") index -= columns;
    else if (event.key === "Home") [index, slot] = [0, 0];
    else if (event.key === "End") [index, slot] = [this.nodes.length - 1, 0];
    else return;
    event.preventDefault();
    if (index < 0 || index >= this.nodes.length) return;
    this.moveTo(index, slot);
    this.tell();
    this.canvas.ask();
  }

  open({index, slot}, wantsNode) {
    const node = this.nodes[index],
      job = slot === null ? null : this.slotsOf(node)[slot];
    if (job && !wantsNode) this.openJob(job);
    else this.openNode(node.name);
  }

  words({index, slot}) {
    const node = this.nodes[index],
      job = slot === null ? null : this.slotsOf(node)[slot];
    const state = node.is_leaving ? ", is given back" : node.is_draining ? `, ${nodeState(node)}` : "";
    const lines = [
      `${node.name}${slot === null ? "" : `, slot ${slot}`}${state}`,
      `${node.used} of ${plural(node.num_slots, "slot")} used · ${node.accelerator}`,
    ];
    if (slot !== null) lines.splice(1, 0, job ? job : "free");
    lines.push(job ? "Click: the job. Shift+click: the node." : "Click: the node.");
    return lines;
  }

  tell() {
    const [x, y] = this.slotCorner(...this.corner(this.cursor.index), this.cursor.slot),
      box = this.canvas.element.getBoundingClientRect();
    const lines = this.words(this.cursor);
    announce(lines.slice(0, 3).join(", "));
    tip.show(lines.slice(0, 3), box.left + x, box.top + y + this.shape.cell);
  }

  updateLegend() {
    const held = new Map();
    for (const node of this.nodes)
      for (const job of node.jobs) held.set(job.name, (held.get(job.name) ?? 0) + job.num_replicas);
    const jobs = [...held].sort((a, b) => b[1] - a[1] || byName(a[0], b[0]));
    let free = 0,
      out = 0; // not for use
    for (const node of this.nodes) {
      const left = Math.max(0, node.num_slots - node.used);
      if (node.is_draining || node.is_leaving) out += left;
      else free += left;
    }
    const isDrained = this.nodes.some(node => node.is_draining || node.is_leaving);
    const mark = JSON.stringify([jobs.slice(0, MOST_IN_LEGEND), jobs.length, free, out, isDrained]);
    if (mark === this.legendMark) return;
    this.legendMark = mark;
    const chips = jobs.slice(0, MOST_IN_LEGEND).map(([name, num]) => {
      const chip = set(jobLink(name), {class: "chip", title: `${name}: ${plural(num, "slot")}`});
      chip.append(h("small", {}, String(num)));
      return chip;
    });
    refill(
      this.legend,
      chips,
      jobs.length > MOST_IN_LEGEND && h("span", {}, `and ${jobs.length - MOST_IN_LEGEND} more`),
      h("span", {class: "key"}, h("span", {class: "swatch free"}), `${free} free`),
      isDrained && h("span", {class: "key"}, h("span", {class: "swatch hatched"}), `${out} drained`),
    );
  }

  remove() {
    this.canvas.remove();
  }
}

function hatch(context, x, y, size, colour) {
  context.save();
  context.beginPath();
  context.rect(x, y, size, size);
  context.clip();
  context.strokeStyle = colour;
  context.globalAlpha = 0.55;
  context.lineWidth = size >= 14 ? 1.5 : 1;
  const step = Math.max(3, size / 4);
  context.beginPath();
  for (let from = -size; from < size; from += step) {
    context.moveTo(x + from, y + size);
    context.lineTo(x + from + size, y);
  }
  context.stroke();
  context.restore();
}
