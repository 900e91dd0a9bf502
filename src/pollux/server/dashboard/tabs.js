/* Tabs, as the keyboard and screen readers know them: arrows, Home and End move, one tab is in the order of Tab. */

import {h, set} from "./dom.js";

/* `parts` are [key, label, ...content]; `onchange(key)` is called when the user chooses another tab. */
export class Tabs {
  constructor({label, parts, chosen, onchange}) {
    this.onchange = onchange;
    this.tabs = new Map();
    for (const [key, text, ...content] of parts) {
      const tab = h(
        "button",
        {type: "button", role: "tab", id: `tab-${key}`, class: "tab", "aria-controls": `panel-${key}`},
        text,
      );
      tab.addEventListener("click", () => this.choose(key));
      const panel = h(
        "div",
        {role: "tabpanel", id: `panel-${key}`, "aria-labelledby": `tab-${key}`, tabindex: "0", class: "panel"},
        content,
      );
      this.tabs.set(key, {tab, panel});
    }
    this.list = h(
      "div",
      {role: "tablist", class: "tabs", "aria-label": label, onkeydown: event => this.press(event)},
      [...this.tabs.values()].map(({tab}) => tab),
    );
    this.element = h("div", {}, this.list, [...this.tabs.values()].map(({panel}) => panel));
    this.show(this.tabs.has(chosen) ? chosen : this.tabs.keys().next().value);
  }

  show(key) {
    this.chosen = key;
    for (const [one, {tab, panel}] of this.tabs) {
      set(tab, {"aria-selected": String(one === key), tabindex: one === key ? "0" : "-1"});
      panel.hidden = one !== key;
    }
  }

  choose(key) {
    if (key === this.chosen) return;
    this.show(key);
    this.onchange(key);
  }

  /* A tab without anything to show. */
  setHidden(key, isHidden) {
    this.tabs.get(key).tab.hidden = isHidden;
    if (isHidden && key === this.chosen) this.show(this.tabs.keys().next().value);
  }

  press(event) {
    const keys = [...this.tabs.keys()].filter(key => !this.tabs.get(key).tab.hidden),
      at = keys.indexOf(this.chosen);
    const next = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: keys.length - 1}[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const key = keys[(next + keys.length) % keys.length];
    this.choose(key);
    this.tabs.get(key).tab.focus();
  }
}
