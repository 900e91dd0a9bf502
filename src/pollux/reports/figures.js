/* Figures in the look's colours. A figure is {data, layout} for plotly, in which colours are names:
   "@0" is the first colour of the palette, "@muted" the variable --muted. Needs plotly only when one is drawn.
   Everything is on window.Look: css, painted, axis, drawFigure, whenThemeChanges. */
"use strict";
window.Look = (() => {
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /* The same with colours in place of their names. */
  function painted(value) {
    if (typeof value === "string" && value[0] === "@")
      return css("--" + (/^@[0-9]/.test(value) ? "c" : "") + value.slice(1));
    if (Array.isArray(value)) return value.map(painted);
    if (value && typeof value === "object" && !ArrayBuffer.isView(value))
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, painted(inner)]));
    return value;
  }

  function axis(own) {
    return {gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--grid"), automargin: true,
      tickfont: {size: 11}, ...own, title: own && own.title ? {...own.title, font: {size: 12}, standoff: 8} : undefined};
  }

  /* Draw it in the element, or draw it anew: what plotly can keep, it keeps. */
  function drawFigure(idOrElement, figure) {
    const {data, layout: own = {}, config = {}} = painted(figure);
    const layout = {showlegend: false, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      font: {family: "system-ui,-apple-system,Segoe UI,Roboto,sans-serif", color: css("--ink"), size: 12},
      hoverlabel: {bgcolor: css("--card"), bordercolor: css("--line"), font: {color: css("--ink")}},
      legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0}, bargap: 0, ...own,
      margin: {l: 44, r: 14, t: 10, b: 40, ...(own.margin || {})}};
    for (const name of ["xaxis", "yaxis", ...Object.keys(own).filter(key => /^[xy]axis[0-9]+$/.test(key))])
      layout[name] = axis(own[name]);
    return Plotly.react(idOrElement, data, layout, {responsive: true, displaylogo: false, displayModeBar: false, ...config});
  }

  /* Colours are read when a figure is drawn, so figures are drawn again when they change. */
  function whenThemeChanges(draw) {
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    new MutationObserver(draw).observe(document.documentElement, {attributes: true, attributeFilter: ["data-theme"]});
  }

  return {css, painted, axis, drawFigure, whenThemeChanges};
})();
