"""The text around a report's figures: HTML, style, and the few lines of JavaScript that draw them.

Used by :mod:`pollux.simulator.report`, which fills in the braces.
"""

from __future__ import annotations

FIGURE = """<figure class="card{wide}"><figcaption>{title}</figcaption>
<div id="{id}" class="plot" role="img" aria-label="{title}" style="height:{height}px"></div></figure>"""

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="pollux {version}">
<title>{title}</title>
<style>{style}</style></head>
<body><main>
<header><h1>{title}</h1><p>{subtitle}</p></header>
<noscript><p class="card">The plots need JavaScript; the tables do not.</p></noscript>
{first}
{sections}
<section><h2>Repeat it</h2><p>pollux {version}</p>{repeat}</section>
</main>
<script>{plotly}</script>
<script type="application/json" id="figures">{figures}</script>
<script>{script}</script>
</body></html>
"""

# Okabe and Ito's palette; yellow is last, and left out on white, where it cannot be seen.
STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1b2230;--muted:#6b7485;--line:#e3e6ec;--grid:#eceff3;--accent:#0072b2;
--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#d55e00;--c4:#cc79a7;--c5:#56b4e9;--c6:#8a93a3;--c7:#1b2230;
--h0:#c7e9b4;--h1:#7fcdbb;--h2:#41b6c4;--h3:#1d91c0;--h4:#225ea8;--h5:#253494;--h6:#081d58}
@media (prefers-color-scheme:dark){:root{--bg:#0f1217;--card:#181c23;--ink:#e6e9ef;--muted:#929bab;--line:#2a303a;
--grid:#252b34;--accent:#56b4e9;--c0:#56b4e9;--c1:#e69f00;--c2:#1fc796;--c3:#f0703a;--c4:#dd93bb;--c5:#3f8fd0;
--c6:#929bab;--c7:#f0e442;--h0:#2f4f9a;--h1:#2a6fb0;--h2:#2191bd;--h3:#41b6c4;--h4:#7fcdbb;--h5:#c7e9b4;--h6:#ffffcc}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 60px}
header p,h2 small,td small{color:var(--muted)}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
header p{margin:0;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:36px 0 4px;overflow-wrap:anywhere}
h2 small{font-size:.85rem;font-weight:400;margin-left:8px}
h3{font-size:1.05rem;margin:28px 0 4px}
p{margin:4px 0 12px}
.lead{font-size:1.02rem}
.card,.scroll{background:var(--card);border:1px solid var(--line);border-radius:10px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:8px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
tbody tr:last-child>*{border-bottom:0}
thead th{color:var(--muted);font-weight:500;font-size:.82rem}
th:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
td small{display:block;font-size:.75rem;line-height:1.1}
.best{font-weight:650;color:var(--accent)}
i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px}
.chips{display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin:14px 0;color:var(--muted);font-size:.88rem}
.chip{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--line);border-radius:999px;
padding:4px 12px;cursor:pointer}
.chip[aria-pressed=false]{opacity:.45;text-decoration:line-through}
.key{display:inline-flex;align-items:center}
.key i{margin-right:4px}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px}
.grid>.wide,.grid>p{grid-column:1/-1}
figure{margin:0;padding:12px 8px 4px;min-width:0}
figcaption{font-weight:600;font-size:.92rem;padding:0 8px;overflow-wrap:anywhere}
.plot{width:100%}
pre{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px;white-space:pre-wrap;
overflow-wrap:anywhere;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
summary{cursor:pointer;color:var(--accent);margin-bottom:8px}
.settings td,.settings th{padding:4px 12px;text-align:left;font-weight:400;white-space:normal}
.settings th{color:var(--muted)}
@media (max-width:760px){main{padding:18px 12px 40px}.grid{grid-template-columns:minmax(0,1fr)}th,td{padding:7px 9px}}
"""

SCRIPT = """
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const hidden = {};
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function painted(value) {
  if (typeof value === "string" && value[0] === "@")
    return css("--" + (/^@[0-9]/.test(value) ? "c" : "") + value.slice(1));
  if (Array.isArray(value)) return value.map(painted);
  if (value && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, painted(inner)]));
  return value;
}
function axis(own) {
  return {gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--grid"), automargin: true,
    tickfont: {size: 11}, ...own, title: own && own.title ? {...own.title, font: {size: 12}, standoff: 8} : undefined};
}
function draw(id) {
  const section = id.split("-")[0], spec = painted(figures[id]);
  const data = spec.data.map(trace => ({...trace, visible: !(hidden[section + "/" + trace.meta])}));
  const layout = {showlegend: false, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
    font: {family: "system-ui,-apple-system,Segoe UI,Roboto,sans-serif", color: css("--ink"), size: 12},
    hoverlabel: {bgcolor: css("--card"), bordercolor: css("--line"), font: {color: css("--ink")}},
    legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0}, bargap: 0, ...spec.layout,
    margin: {l: 44, r: 14, t: 10, b: 40, ...(spec.layout.margin || {})}};
  for (const name of ["xaxis", "yaxis", "yaxis2"])
    if (name !== "yaxis2" || spec.layout.yaxis2) layout[name] = axis(spec.layout[name]);
  Plotly.react(id, data, layout, {responsive: true, displaylogo: false, displayModeBar: false});
}
const drawAll = () => Object.keys(figures).forEach(draw);
drawAll();
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
document.querySelectorAll("section").forEach((section, number) =>
  section.querySelectorAll(".chip").forEach(chip => chip.addEventListener("click", () => {
    const isShown = chip.getAttribute("aria-pressed") !== "true";
    chip.setAttribute("aria-pressed", isShown);
    hidden["w" + number + "/" + chip.dataset.policy] = !isShown;
    Object.keys(figures).filter(id => id.startsWith("w" + number + "-")).forEach(draw);
  })));
"""
