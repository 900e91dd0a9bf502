/* The dashboard: which page is shown, who may see it, and whether the server is there. */

import {api, remember, remembered, setToken, takeTokenFromAddress, whenDenied} from "./api.js";
import {clusterPage} from "./cluster.js";
import {decisionsPage} from "./decisions.js";
import {announce, fill, h, set, setText, tip} from "./dom.js";
import {jobPage} from "./job.js";
import {jobsPage} from "./jobs.js";
import {noticeEnds} from "./notices.js";
import {sideBySidePage} from "./side_by_side.js";
import {simulationsPage} from "./simulations.js";
import {connect, forget, store, subscribe, tryNow} from "./store.js";
import {studiesPage, studyPage} from "./studies.js";
import {openSubmit} from "./submit.js";
import {usagePage} from "./usage.js";

const BANNER_AFTER_MS = 800; // a restart behind a proxy is not worth a word
const content = document.getElementById("content"),
  banner = document.getElementById("banner");
let page = null,
  isDenied = false;

/* --- pages ---------------------------------------------------------------------------------------------------- */

const go = hash => {
  location.hash = hash;
};

function makePage(hash) {
  const [path, query = ""] = hash.split("?");
  const parts = path
    .replace(/^#\/?/, "")
    .split("/")
    .filter(Boolean)
    .map(part => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
  if (!parts.length) return clusterPage({go});
  if (parts[0] === "jobs") return parts.length > 1 ? jobPage({name: parts.slice(1).join("/"), query, go}) : jobsPage(query);
  if (parts[0] === "decisions") return decisionsPage();
  if (parts[0] === "studies") return parts.length > 1 ? studyPage({name: parts.slice(1).join("/")}) : studiesPage();
  if (parts[0] === "simulations") return simulationsPage();
  if (parts[0] === "compare") return sideBySidePage(query);
  if (parts[0] === "usage") return usagePage();
  return {
    title: "Not found",
    update() {},
    remove() {},
    element: h(
      "div",
      {class: "card pad empty-page"},
      h("h1", {}, "There is no such page"),
      h("p", {}, h("a", {href: "#/"}, "To the cluster")),
    ),
  };
}

/* What was asked on a page goes with it. */
function closeDialogs() {
  for (const open of document.querySelectorAll("dialog:not(#token-dialog)")) open.close();
}

function show({keepsFocus = false} = {}) {
  page?.remove();
  page = null;
  tip.hide();
  for (const link of document.querySelectorAll("#nav a")) {
    const own = link.getAttribute("href"),
      isHere = own === "#/" ? /^#?\/?$/.test(location.hash) : location.hash.startsWith(own) || (own === "#/jobs" && location.hash.startsWith("#/compare"));
    set(link, {"aria-current": isHere ? "page" : null});
  }
  if (isDenied) {
    fill(content);
    return;
  }
  if (!store.hasState) {
    fill(content, h("div", {class: "loading", role: "status"}, "Asking the server …"));
    return;
  }
  page = makePage(location.hash);
  document.title = `${page.title} · Pollux`;
  fill(content, page.element);
  performance.mark("pollux-shown");
  if (!keepsFocus) {
    scrollTo(0, 0);
    content.focus({preventScroll: true});
    announce(page.title);
  }
}

addEventListener("hashchange", () => {
  if (takeTokenFromAddress()) {
    start();
    return;
  }
  closeDialogs();
  show();
});
document.querySelector(".skip").addEventListener("click", event => {
  event.preventDefault();
  content.focus();
  content.scrollIntoView();
});

subscribe(changes => {
  if (isDenied) return;
  if (changes.isFull || changes.jobs.size) noticeEnds();
  if (!page) show({keepsFocus: true});
  else page.update(changes);
});

/* --- the connection ------------------------------------------------------------------------------------------- */

const live = document.getElementById("live"),
  liveText = live.querySelector(".live-text");
let bannerTimer = null;

function onState(state, {message}) {
  live.dataset.state = state;
  setText(liveText, {on: "live", off: "offline", denied: "no access"}[state]);
  if (state !== "off") {
    clearTimeout(bannerTimer);
    bannerTimer = null;
    if (state === "on" && !banner.hidden) announce("The server is back.");
    banner.hidden = true;
    return;
  }
  const text = `Connection lost, trying again. ${message}`;
  if (!banner.hidden) {
    setText(banner.firstElementChild, text);
    return;
  }
  bannerTimer ??= setTimeout(
    () => {
      if (store.isConnected) return;
      fill(
        banner,
        h("span", {}, text),
        h("button", {type: "button", class: "ghost small", onclick: tryNow}, "Try now"),
      );
      banner.hidden = false;
      announce(text);
      if (!store.hasState) fill(content, h("div", {class: "loading"}, "The server cannot be reached."));
    },
    store.hasState ? BANNER_AFTER_MS : 0,
  );
}

/* --- the token ------------------------------------------------------------------------------------------------ */

/* Viewers get no buttons that would be refused. */
async function showIdentity() {
  let me = null;
  try {
    me = await api("/me");
  } catch {
    return; // the stream tells why
  }
  Object.assign(document.body.dataset, {role: me.role, user: me.user});
  setText(document.getElementById("me"), me.user === "operator" ? "" : `${me.user}${me.team ? ` · ${me.team}` : ""}`);
}

function askToken(message, hadToken) {
  isDenied = true;
  page?.remove();
  page = null;
  fill(content);
  closeDialogs();
  if (document.getElementById("token-dialog")) return;
  const input = h("input", {
    type: "password",
    id: "token-field",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    "aria-describedby": "token-help",
  });
  const dialog = h(
    "dialog",
    {id: "token-dialog", class: "ask", "aria-labelledby": "token-title"},
    h(
      "form",
      {
        onsubmit: event => {
          event.preventDefault();
          if (!input.value.trim()) return;
          setToken(input.value);
          dialog.isDone = true;
          dialog.close();
          start();
        },
      },
      h("h2", {id: "token-title"}, "A token is needed"),
      hadToken && h("p", {class: "problem", role: "alert"}, "The token was not accepted."),
      h(
        "p",
        {id: "token-help"},
        "On the machine of the server, ",
        h("code", {}, "pollux dashboard"),
        " opens this page with the token in it. It is also in the file ",
        h("code", {}, "token"),
        " in the server's data directory.",
      ),
      h("label", {class: "field", for: "token-field"}, h("span", {}, "Token"), input),
      h("div", {class: "actions"}, h("button", {type: "submit", class: "primary"}, "Go on")),
    ),
  );
  dialog.addEventListener("cancel", event => event.preventDefault()); // there is nothing behind it
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (!dialog.isDone && isDenied) askToken(message, hadToken);
  });
  document.body.append(dialog);
  dialog.showModal();
  input.focus();
}

whenDenied((message, hadToken) => {
  onState("denied", {});
  askToken(message, hadToken);
});

function start() {
  isDenied = false;
  document.getElementById("token-dialog")?.remove();
  forget();
  show({keepsFocus: true});
  connect(onState);
  showIdentity();
}

/* --- the bar -------------------------------------------------------------------------------------------------- */

const THEMES = {"": ["◐", "as the system has it"], light: ["☀", "light"], dark: ["☾", "dark"]};
const theme = document.getElementById("theme");

function setTheme(value) {
  remember("pollux-theme", value);
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
  setText(theme, THEMES[value][0]);
  set(theme, {"aria-label": `Colours: ${THEMES[value][1]}`, title: `Colours: ${THEMES[value][1]}`});
}

theme.addEventListener("click", () => {
  const names = Object.keys(THEMES),
    at = names.indexOf(document.documentElement.dataset.theme ?? "");
  setTheme(names[(at + 1) % names.length]);
});
document.getElementById("submit").addEventListener("click", () => openSubmit({go}));
setTheme(remembered("pollux-theme") in THEMES ? remembered("pollux-theme") : "");
takeTokenFromAddress();
window.pollux = {store}; // for benchmarks and debugging
start();
