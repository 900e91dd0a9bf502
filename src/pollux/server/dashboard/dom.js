/* Making and updating elements. Text always goes in as text: nothing here, or anywhere else, parses HTML. */

import {byName} from "./format.js";

/* h("td", {class: "num", onclick: f, title: "x"}, "text", element, [more]) */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  set(element, attributes);
  element.append(...flat(children));
  return element;
}

const flat = children =>
  children
    .flat(Infinity)
    .filter(child => child !== null && child !== undefined && child !== false)
    .map(child => (child instanceof Node ? child : String(child)));

export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (value === true) element.setAttribute(name, "");
    else if (value === false || value === null || value === undefined) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
  return element;
}

/* Touches the page only if the text is another: most of what is told again is the same. */
export function setText(element, text) {
  const wanted = String(text ?? "");
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function fill(element, ...children) {
  element.replaceChildren(...flat(children));
  return element;
}

/* `fill` for what may hold the focus: the link or button that has it keeps it when it is made anew. */
export function refill(element, ...children) {
  const active = document.activeElement,
    all = () => [...element.querySelectorAll("a, button, input")],
    at = all().indexOf(active),
    href = active.getAttribute("href");
  fill(element, ...children);
  if (at < 0) return;
  const made = all(),
    same = href && made.find(one => one.getAttribute("href") === href);
  (same || made[Math.min(at, made.length - 1)])?.focus({preventScroll: true});
}

/* Rows by key: elements are made once, moved if they must be, and updated in place. The focus stays where it is. */
export class KeyedList {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make; // item -> {element, update(item)}
    this.rows = new Map();
  }

  update(items, keyOf) {
    const wanted = new Set(items.map(keyOf));
    for (const [key, row] of this.rows)
      if (!wanted.has(key)) {
        row.element.remove();
        this.rows.delete(key);
      }
    let place = this.parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, (row = this.make(item)));
      row.update(item);
      if (row.element === place) place = place.nextElementSibling;
      else {
        const focused = row.element.contains(document.activeElement) ? document.activeElement : null;
        this.parent.insertBefore(row.element, place);
        focused?.focus({preventScroll: true}); // whatever is moved loses it
      }
    }
  }
}

/* A table whose columns are {key, label, title, value(item), cell(item) -> text or nodes, class}. At most `step` rows
   stand in the page; a button shows more. Sorting is by the column's value; null comes last either way. `expand(item)`
   gives rows that stand under it. A table that is wider than its place says so, and can be scrolled. */
export class DataTable {
  constructor({columns, keyOf, step = 100, sort = null, empty = "Nothing here.", label = "", onsort, expand}) {
    Object.assign(this, {columns, keyOf, step, limit: step, sort, items: [], expand});
    this.onsort = onsort ?? (() => {});
    this.head = h("tr");
    for (const column of columns) {
      const button =
        column.value &&
        h(
          "button",
          {type: "button", class: "sort", title: column.title, onclick: () => this.sortBy(column)},
          column.label,
        );
      column.th = h("th", {scope: "col", class: column.class, title: column.title}, button || column.label);
      this.head.append(column.th);
    }
    this.body = h("tbody");
    this.empty = h("p", {class: "empty"}, empty);
    this.more = h("button", {
      type: "button",
      class: "ghost more",
      hidden: true,
      onclick: () => {
        this.limit += this.step;
        this.update(this.items);
      },
    });
    this.table = h("table", {"aria-label": label}, h("thead", {}, this.head), this.body);
    this.scroll = h("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": label}, this.table);
    this.cut = h("p", {class: "cut-hint", hidden: true}, "More columns: scroll sideways →");
    this.box = h("div", {class: "scroll-box"}, this.scroll);
    this.element = h("div", {class: "table"}, this.box, this.cut, this.empty, this.more);
    this.scroll.addEventListener("scroll", () => this.seeCut(), {passive: true});
    new ResizeObserver(() => this.seeCut()).observe(this.scroll);
    new ResizeObserver(() => this.seeCut()).observe(this.table);
    this.list = new KeyedList(this.body, () => this.makeRow());
  }

  makeRow() {
    const cells = this.columns.map((column, index) =>
      h(index ? "td" : "th", {class: column.class, ...(index ? {} : {scope: "row"})}),
    );
    const shown = cells.map(() => undefined);
    return {
      element: h("tr", {}, cells),
      update: item =>
        this.columns.forEach((column, index) => {
          // A cell made of elements says by `mark` when it has to be made again.
          const mark = column.mark ? column.mark(item) : column.cell(item);
          if (mark === shown[index]) return;
          shown[index] = mark;
          const content = column.mark ? column.cell(item) : mark;
          if (typeof content === "string") setText(cells[index], content);
          else refill(cells[index], content);
        }),
    };
  }

  /* Which sides of the table are out of sight. */
  seeCut() {
    const {scrollLeft, scrollWidth, clientWidth} = this.scroll,
      hidden = scrollWidth - clientWidth;
    const sides = [scrollLeft > 2 && "left", hidden - scrollLeft > 2 && "right"].filter(Boolean).join(" ");
    set(this.box, {"data-cut": sides || null});
    this.cut.hidden = hidden <= 2;
  }

  sortBy(column) {
    const isSame = this.sort?.key === column.key;
    this.sort = {key: column.key, isDown: isSame ? !this.sort.isDown : Boolean(column.isDown)};
    this.update(this.items);
    this.onsort();
  }

  update(items) {
    this.items = items;
    const column = this.columns.find(one => one.key === this.sort?.key);
    for (const one of this.columns)
      set(one.th, {"aria-sort": one === column ? (this.sort.isDown ? "descending" : "ascending") : null});
    const sort = some => (column ? sortedBy(some, column.value, this.sort.isDown) : some);
    const rows = sort(items).slice(0, this.limit);
    this.list.update(this.expand ? rows.flatMap(item => [item, ...sort(this.expand(item))]) : rows, this.keyOf);
    const left = items.length - this.limit;
    this.more.hidden = left <= 0;
    setText(this.more, `Show ${Math.min(left, this.step)} more of ${left}`);
    this.scroll.hidden = !items.length;
    this.empty.hidden = items.length > 0;
  }
}

function sortedBy(items, value, isDown) {
  const sign = isDown ? -1 : 1;
  return items
    .map(item => [value(item), item])
    .sort(([a], [b]) => {
      if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
      if (b === null || b === undefined) return -1;
      return sign * (typeof a === "string" ? byName(a, b) : a - b);
    })
    .map(([, item]) => item);
}

/* What is told now and then, by a screen reader too. */
export function announce(text) {
  setText(document.getElementById("announcer"), text);
}

export function toast(message, kind = "error") {
  const box = document.getElementById("toasts");
  for (const told of [...box.children]) if (told.firstElementChild.textContent === message) told.remove(); // once is enough
  const close = h(
    "button",
    {type: "button", class: "ghost square", "aria-label": "Close", onclick: () => one.remove()},
    "×",
  );
  const one = h("div", {class: `toast ${kind}`}, h("span", {}, message), close);
  while (box.children.length >= 4) box.firstElementChild.remove();
  box.append(one);
  setTimeout(() => one.remove(), kind === "error" ? 12000 : 5000);
}

/* A question as a modal dialog; resolves to true if it is answered with the action, to null if closed. */
export function confirmDialog({title, text, action, field = null}) {
  return new Promise(resolve => {
    const input = field && h("input", {type: "text", id: "confirm-field", maxlength: "1000", autocomplete: "off"});
    const dialog = h(
      "dialog",
      {class: "ask", "aria-labelledby": "confirm-title"},
      h(
        "form",
        {method: "dialog"},
        h("h2", {id: "confirm-title"}, title),
        h("p", {}, text),
        input && h("label", {for: "confirm-field", class: "field"}, h("span", {}, field), input),
        h(
          "div",
          {class: "actions"},
          // No submit button: Enter in the field means the action.
          h("button", {type: "button", class: "ghost", onclick: () => dialog.close()}, "Keep as it is"),
          h("button", {type: "submit", value: "yes", class: "danger"}, action),
        ),
      ),
    );
    dialog.addEventListener("close", () => {
      const isYes = dialog.returnValue === "yes";
      dialog.remove();
      resolve(isYes ? {text: input ? input.value : ""} : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/* Browsers allow six connections to a server, for all tabs together: one that is not visible gives its streams back
   after a while, and takes them again when it is seen. Returns how to end that. */
const HIDDEN_MS = 20000;
export function whileSeen(pause, resume) {
  let timer = null,
    isPaused = false;
  const look = () => {
    clearTimeout(timer);
    if (document.hidden)
      timer = setTimeout(() => {
        isPaused = true;
        pause();
      }, HIDDEN_MS);
    else if (isPaused) {
      isPaused = false;
      resume();
    }
  };
  document.addEventListener("visibilitychange", look);
  return () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
  };
}

/* One box that follows the pointer. */
export const tip = {
  show(lines, x, y) {
    const box = document.getElementById("tip");
    fill(
      box,
      lines.map((line, index) => h(index ? "div" : "strong", {}, line)),
    );
    box.hidden = false;
    const {width, height} = box.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), innerWidth - width - 8);
    const top = y + 18 + height > innerHeight ? y - height - 10 : y + 18;
    box.style.left = `${left}px`;
    box.style.top = `${Math.max(8, top)}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};
