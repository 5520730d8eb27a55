// Charts: Plotly's script comes after the figures, so that the page is there at once.
"use strict";

const Charts = (() => {
  let loading = null;
  const load = () => loading ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = new URL("dashboard/static/plotly.min.js", document.baseURI);
    script.onload = () => done(window.Plotly);
    script.onerror = () => { loading = null; failed(new Error("the chart library did not load")); };
    document.head.append(script);
  });
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const layout = (more) => ({
    margin: { l: 56, r: 12, t: 6, b: 36 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { color: color("muted"), size: 12, family: "system-ui, sans-serif" },
    legend: { orientation: "h", y: 1.16, x: 0 }, hovermode: "x unified", bargap: 0.15,
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text") } },
    xaxis: { gridcolor: color("line"), zeroline: false, type: "date", automargin: true, ...more.xaxis },
    yaxis: { gridcolor: color("line"), tickfont: { color: color("muted") }, zerolinecolor: color("line"), rangemode: "tozero", automargin: true, ...more.yaxis },
    barmode: more.barmode,
  });
  const times = (starts) => starts.map((start) => new Date(start * 1000));

  // One chart, a sentence that says the same, and the same figures as a table.
  async function draw(id, series, more, sentence) {
    const box = document.getElementById(id);
    let figure = box.querySelector("figure");
    if (!figure) {
      box.classList.add("wait");
      box.textContent = "drawing …";
    }
    const plotly = await load();
    if (!figure) {
      box.classList.remove("wait");
      box.textContent = "";
      figure = document.createElement("figure");
      figure.append(document.createElement("div"));
      figure.firstChild.style.height = `${box.clientHeight || 280}px`;
      figure.firstChild.setAttribute("role", "img");
      box.style.height = "auto";
      box.append(figure, table());
    }
    figure.firstChild.setAttribute("aria-label", sentence);
    fill(box.querySelector("table"), series, more.unit ?? String);
    await plotly.react(figure.firstChild, series, layout(more), { displayModeBar: false, responsive: true });
  }

  function table() {
    const details = document.createElement("details");
    details.className = "asTable";
    details.innerHTML = '<summary>as a table</summary><div class="scroll"><table><thead></thead><tbody></tbody></table></div>';
    return details;
  }

  function fill(target, series, unit) {
    const row = (cells, tag) => {
      const tr = document.createElement("tr");
      for (const cell of cells) tr.append(Object.assign(document.createElement(tag), { textContent: cell }));
      return tr;
    };
    const xs = [...new Set(series.flatMap((one) => one.x.map(Number)))].sort((a, b) => a - b);
    target.tHead.replaceChildren(row(["time", ...series.map((one) => one.name)], "th"));
    const at = series.map((one) => new Map(one.x.map((x, i) => [Number(x), one.y[i]])));
    target.tBodies[0].replaceChildren(...xs.slice(-200).reverse().map((x) => row(
      [new Date(x).toLocaleString(), ...at.map((known) => known.has(x) && known.get(x) != null ? unit(known.get(x)) : "–")], "td")));
  }

  return { draw, color, times };
})();
