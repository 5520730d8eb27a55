// The dashboard: asks /dashboard/api for figures and shows them. Nothing that a caller chose is ever read as markup.
"use strict";

const $ = (id) => document.getElementById(id);
const RANGES = { "1h": 3600, "24h": 86400, "7d": 7 * 86400, "30d": 30 * 86400, "1y": 365 * 86400 };
const TABS = { tenant: "Tenants", model: "Models", cache: "Tiers", key: "Keys", backend: "Backends", surface: "APIs" };
const HITS = ["exact", "semantic", "alias", "stale"];
const state = { range: "24h", from: null, to: null, tenant: "", by: "tenant", me: null, newest: 0, oldest: 0, asked: 0, declined: false, opening: 0 };
// `opening`: the request of the address, until it or another one has been opened: what is closed stays closed.
// Answers to what was asked before something else was chosen are thrown away.
const current = () => { const asked = state.asked; return () => asked === state.asked; };
const EVERY = 10_000, LIVE = 2_500;

// --- small things -----------------------------------------------------------------------------------------------
const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value != null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
};
const usd = (value) => {
  if (value == null) return "no price";
  const size = Math.abs(value), digits = size === 0 ? 2 : size >= 1 ? 2 : size >= 0.01 ? 4 : 6;
  return value.toLocaleString(undefined, { style: "currency", currency: "USD", minimumFractionDigits: digits === 6 ? 2 : digits, maximumFractionDigits: digits });
};
const number = (value) => Math.round(value).toLocaleString();
const short = (value) => Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 }).format(value);
const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(part / whole >= 0.0995 ? 0 : 1)} %` : "–";
const time = (seconds) => seconds == null ? "–" : seconds < 0.001 ? `${(seconds * 1e6).toFixed(0)} µs` : seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
const clock = (at) => new Date(at * 1000).toLocaleTimeString();
const saved = (row) => row.cold - row.cost;
// Put in only what differs: whoever is reading, or stands there with the keyboard, is not disturbed.
function show(node, ...children) {
  const fresh = document.createElement(node.tagName);
  fresh.append(...children.filter((child) => child != null));
  if (fresh.innerHTML === node.innerHTML) return;
  const focus = node.contains(document.activeElement) ? document.activeElement.closest("[data-name]")?.dataset.name : null;
  node.replaceChildren(...fresh.childNodes);
  if (focus != null) [...node.querySelectorAll("[data-name]")].find((one) => one.dataset.name === focus)?.querySelector("button, a")?.focus();
}
const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] || 0), 0);

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function fetched(path, parameters = {}) {
  const url = new URL(`dashboard/api/${path}`, document.baseURI);
  for (const [name, value] of Object.entries(parameters)) if (value !== "" && value != null) url.searchParams.set(name, value);
  const key = sessionStorage.getItem("hitherto-key");
  const reply = await fetch(url, { headers: key ? { "x-api-key": key } : {}, cache: "no-store" });
  if (!reply.ok) {
    const said = await reply.json().catch(() => ({}));
    const detail = Array.isArray(said.detail) ? said.detail.map((one) => `${one.loc?.at(-1)}: ${one.msg}`).join("; ") : said.detail;
    throw new Refused(reply.status, said.error?.message ?? detail ?? `${path}: ${reply.status}`);
  }
  return reply;
}
const ask = async (path, parameters) => (await fetched(path, parameters)).json();

function range() {
  const asked = state.from ? { from: state.from, to: state.to ?? Date.now() / 1000 } : { last: RANGES[state.range] };
  return { ...asked, tenant: state.tenant };
}

// --- where we are, in the address ----------------------------------------------------------------------------------
function readAddress() {
  const asked = new URLSearchParams(location.search);
  state.range = Object.hasOwn(RANGES, asked.get("range")) ? asked.get("range") : "24h";
  state.from = Number(asked.get("from")) || null;
  state.to = Number(asked.get("to")) || null;
  state.tenant = asked.get("tenant") ?? "";
  state.by = Object.hasOwn(TABS, asked.get("by")) ? asked.get("by") : "tenant";
  state.opening = Number(/^#request=(\d+)$/.exec(location.hash)?.[1] ?? 0);
}

function writeAddress() {
  const told = new URLSearchParams();
  if (state.from) { told.set("from", state.from); if (state.to) told.set("to", state.to); } else told.set("range", state.range);
  if (state.tenant) told.set("tenant", state.tenant);
  if (state.by !== "tenant") told.set("by", state.by);
  history.replaceState(null, "", `?${told}${location.hash}`);
}

// --- the parts -----------------------------------------------------------------------------------------------------
const TILES = ["spent", "saved", "without", "requests", "hit rate", "prefix reuse", "first byte", "failed"];

function waitingTiles() {
  $("tiles").replaceChildren(...TILES.map((name) => el("dl", { class: "tile wait" }, el("dt", {}, name), el("dd", {}, "–"))));
}

function tiles(total, kinds, quantiles) {
  const requests = total.requests ?? 0, hits = sum(kinds.filter((row) => HITS.includes(row.cache)), "requests");
  const looked = requests - sum(kinds.filter((row) => ["bypass", "none"].includes(row.cache)), "requests");
  const kind = Object.fromEntries(quantiles.map((row) => [row.kind, row]));
  const failed = sum(kinds.filter((row) => row.outcome === "failed"), "requests");
  const refused = sum(kinds.filter((row) => row.outcome === "refused"), "requests");
  const shown = [
    ["spent", usd(total.cost ?? 0), total.estimated ? `${number(total.estimated)} of ${number(total.parts)} rows are guessed` : "as the providers told it"],
    ["saved", usd(saved(total)), `${percent(saved(total), total.cold)} of the bill`, "good"],
    ["without", usd(total.cold ?? 0), "the same traffic, nothing cached"],
    ["requests", short(requests), total.unpriced ? `${number(total.unpriced)} without a price` : `${short((total.prompt ?? 0) + (total.completion ?? 0))} tokens paid`],
    ["hit rate", percent(hits, looked), `${number(hits)} stored answers of ${number(looked)}`],
    ["prefix reuse", percent(total.cached ?? 0, total.prompt ?? 0), `${short(total.cached ?? 0)} of ${short(total.prompt ?? 0)} prompt tokens`],
    ["first byte", time(kind.hit?.p50), `stored; cold ${time(kind.miss?.p50)}, cached prefix ${time(kind.prefix?.p50)}`],
    ["failed", number(failed), `${number(refused)} refused`],
  ];
  show($("tiles"), ...shown.map(([name, value, small, look]) =>
    el("dl", { class: `tile ${look ?? ""}`, "data-tile": name }, el("dt", {}, name), el("dd", {}, value), el("small", {}, small))));
}

function overTime(rows) {
  const starts = [...new Set(rows.map((row) => row.start))].sort((a, b) => a - b);
  const groups = starts.map((start) => rows.filter((row) => row.start === start));
  return { starts, x: Charts.times(starts), of: (value) => groups.map(value) };
}

async function charts(rows, quantiles, total, about) {
  const at = overTime(rows), { x } = at, color = Charts.color, step = about.step * 1000;
  const begin = Math.max(about.from, (at.starts[0] ?? about.from) - 12 * about.step);  // a young gateway has little to show
  const xaxis = { range: [new Date(begin * 1000 - step / 2), new Date(Math.min(about.to, Date.now() / 1000) * 1000 + step / 2)] };
  const bar = (name, y, tint) => ({ type: "bar", name, x, y, width: step * 0.86, marker: { color: color(tint) } });
  const dollars = { tickprefix: "$", tickformat: "~g" };
  await Charts.draw("money", [
    bar("spent", at.of((group) => sum(group, "cost")), "c-spent"),
    bar("saved: exact", at.of((group) => sum(group, "saved_exact")), "c-exact"),
    bar("saved: semantic", at.of((group) => sum(group, "saved_semantic")), "c-semantic"),
    bar("saved: prefix", at.of((group) => sum(group, "saved_prefix")), "c-prefix"),
  ], { xaxis, barmode: "relative", yaxis: dollars, unit: usd }, `Money over time: ${usd(total.cost)} spent and ${usd(saved(total))} saved.`);

  const running = (values) => values.map(((so) => (value) => so += value)(0));
  const line = (name, y, tint, more = {}) => ({ type: "scatter", mode: "lines+markers", marker: { size: 3 }, name, x, y, line: { color: color(tint), width: 2.5 }, ...more });
  const cost = running(at.of((group) => sum(group, "cost"))), cold = running(at.of((group) => sum(group, "cold")));
  $("whatif-text").textContent = `The same traffic without Hitherto: ${usd(total.cold)} instead of ${usd(total.cost)}.`;
  await Charts.draw("whatif", [
    line("with Hitherto", cost, "c-exact"),
    line("without", cold, "c-spent", { fill: "tonexty", fillcolor: `${color("c-exact")}22` }),
  ], { xaxis, yaxis: dollars, unit: usd }, $("whatif-text").textContent);

  const share = (tiers) => at.of((group) => {
    const all = sum(group, "requests");
    return all ? 100 * sum(group.filter((row) => tiers.includes(row.cache)), "requests") / all : null;
  });
  await Charts.draw("hits", [
    bar("exact", share(["exact", "stale"]), "c-exact"), bar("semantic", share(["semantic", "alias"]), "c-semantic"),
    bar("computed", share(["miss"]), "c-miss"), bar("not asked", share(["bypass", "none"]), "c-other"),
  ], { xaxis, barmode: "stack", yaxis: { ticksuffix: " %", range: [0, 100] }, unit: (y) => `${y.toFixed(1)} %` },
    `Share of requests by where the answer came from.`);

  const names = { hit: ["stored", "c-exact"], prefix: ["cached prefix", "c-prefix"], miss: ["cold", "c-spent"] };
  const lines = Object.entries(names).flatMap(([kind, [name, tint]]) => {
    const own = quantiles.filter((row) => row.kind === kind), xs = Charts.times(own.map((row) => row.start));
    const each = (what, dash) => ({ type: "scatter", mode: "lines+markers", name: `${name} ${what}`, x: xs, y: own.map((row) => 1000 * row[what]),
      marker: { size: 4 }, line: { color: color(tint), dash, width: 2 } });
    return own.length ? [each("p50"), each("p95", "dot")] : [];
  });
  await Charts.draw("ttft", lines, { xaxis, yaxis: { type: "log", ticksuffix: " ms", rangemode: "normal", dtick: 1 }, unit: (y) => time(y / 1000) },
    "Time to the first byte, stored answers against computed ones.");

  await Charts.draw("tokens", [
    bar("computed", at.of((group) => sum(group, "prompt") - sum(group, "cached")), "c-miss"),
    bar("provider's cache", at.of((group) => sum(group, "upstream")), "c-prefix"),
    bar("KV on the device", at.of((group) => sum(group, "device")), "c-semantic"),
    bar("KV in RAM, on disk, in Redis", at.of((group) => sum(group, "ram") + sum(group, "disk") + sum(group, "redis")), "c-spent"),
    bar("not needed", at.of((group) => sum(group, "avoided_prompt")), "c-exact"),
  ], { xaxis, barmode: "stack", yaxis: { tickformat: "~s" }, unit: number }, "Prompt tokens by where they came from.");
}

const head = (table, names, texts = 1) => table.tHead.replaceChildren(el("tr", {}, ...names.map((name, place) => el("th", { scope: "col", class: place < texts && "left" }, name))));

function tabs() {
  if (!$("tabs").children.length) makeTabs();
  for (const tab of $("tabs").children) {
    tab.setAttribute("aria-selected", String(tab.dataset.by === state.by));
    tab.tabIndex = tab.dataset.by === state.by ? 0 : -1;
  }
}

function makeTabs() {
  $("tabs").replaceChildren(...Object.entries(TABS).map(([by, name]) => el("button", {
    type: "button", role: "tab", "aria-controls": "panel", "data-by": by,
    onclick: () => { state.by = by; state.asked += 1; writeAddress(); tabs(); groups().catch(failed); },
    onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const all = [...$("tabs").children], next = all[(all.indexOf(event.target) + step + all.length) % all.length];
      next.click();
      next.focus();
    },
  }, name)));
}

async function groups() {
  const valid = current(), chosen = state.by;
  const by = chosen === "key" ? "tenant,key" : chosen;
  const { rows } = await ask("totals", { ...range(), by });
  const most = Math.max(...rows.map((row) => row.cold), 1e-12);
  const headings = [TABS[chosen].slice(0, -1), "requests", "hits", "spent", "saved", "saved %", "without", "tokens paid", "tokens avoided"];
  const hits = chosen === "cache" ? [] : (await ask("totals", { ...range(), by: `${by},cache` })).rows;
  if (!valid()) return;
  head($("groups"), headings);
  const nameOf = (row) => chosen === "key" ? `${row.tenant} · ${row.key || "no key"}` : row[chosen] || "none";
  const shown = rows.sort((a, b) => b.cold - a.cold || b.requests - a.requests).slice(0, 50);
  $("groups").dataset.by = chosen;
  const named = shown.map((row) => {
    const mine = hits.filter((one) => nameOf(one) === nameOf(row)), own = mine.filter((one) => HITS.includes(one.cache));
    const asked = sum(mine.filter((one) => !["bypass", "none"].includes(one.cache)), "requests");
    const name = chosen === "tenant" && state.me.admin
      ? el("button", { type: "button", class: "link", onclick: () => choose({ tenant: row.tenant }) }, row.tenant || "none") : nameOf(row);
    return el("tr", { "data-name": nameOf(row) }, el("td", {}, name), el("td", {}, number(row.requests)),
      el("td", {}, chosen === "cache" ? "" : percent(sum(own, "requests"), asked)), el("td", {}, usd(row.cost)),
      el("td", {}, usd(saved(row)), meter(saved(row) / most)), el("td", {}, percent(saved(row), row.cold)), el("td", {}, usd(row.cold)),
      el("td", {}, short(row.prompt + row.completion)), el("td", {}, short(row.avoided_prompt + row.avoided_completion)));
  });
  keep($("groups").tBodies[0], named);
}

// Rows with buttons are compared by what they say; their handlers stay with them.
function keep(body, rows) {
  if (body.textContent === rows.map((row) => row.textContent).join("")) return;
  const focus = body.contains(document.activeElement) ? document.activeElement.closest("[data-name]")?.dataset.name : null;
  body.replaceChildren(...rows);
  if (focus != null) rows.find((row) => row.dataset.name === focus)?.querySelector("button")?.focus();
}

function meter(share) {
  const fill = el("i");
  fill.setAttribute("style", `width: ${Math.max(0, Math.min(1, share)) * 100}%`);
  return el("span", { class: "bar", "aria-hidden": "true" }, fill);
}

async function valuable() {
  const valid = current(), { rows, from } = await ask("entries", { ...range(), limit: 10 });
  if (!valid()) return;
  $("entries-since").textContent = `Whole days since ${new Date(from * 1000).toLocaleDateString()}.`;
  head($("entries"), ["question", "hits", "saved", "last"]);
  show($("entries").tBodies[0], ...rows.map((row) => el("tr", {},
    el("td", { class: "text" }, row.question ?? `${row.model}, entry ${row.entry.slice(0, 16)}`), el("td", {}, number(row.hits)), el("td", {}, usd(row.saved)),
    el("td", {}, new Date(row.last * 1000).toLocaleString()))), ...(rows.length ? [] : [el("tr", {}, el("td", { colspan: 4 }, "No stored answer was served yet."))]));
}

async function budgets() {
  const valid = current(), found = await ask("budgets", { tenant: state.tenant });
  if (!valid()) return;
  show($("budgets"), ...found.slice(0, 12).map((one) => {
    const used = (one.spent + one.held) / (one.limit || 1e-9), fill = el("i");
    fill.setAttribute("style", `width: ${Math.min(1, used) * 100}%`);
    return el("div", { class: `meter ${used >= 1 ? "over" : used >= 0.8 ? "near" : ""}`, role: "meter", "aria-valuemin": 0, "aria-valuemax": 100,
      "aria-valuenow": Math.min(100, Math.round(used * 100)), "aria-valuetext": `${Math.round(used * 100)} percent spent`, "aria-label": `${one.tenant}, ${one.period}` },
    el("span", {}, one.tenant, " ", el("span", { class: "muted" }, one.period)), el("div", {}, fill), el("span", {}, `${usd(one.spent)} of ${usd(one.limit)}`));
  }), ...(found.length ? [] : [el("p", { class: "muted" }, "No budget is set (budget: {per_month: 500 USD}).")]));
}

async function gateway() {
  for (const section of document.querySelectorAll(".operator")) section.hidden = !state.me.admin;
  if (!state.me.admin) return;
  const told = await ask("state");
  $("version").textContent = `hitherto ${told.version}`;
  const list = (items, none) => items.length ? el("ul", { class: "plain" }, ...items) : el("p", { class: "muted" }, none);
  const notes = [...Object.entries(told.notes), ...Object.entries(told.wrong)].map(([name, text]) => el("li", {}, el("strong", {}, name), ` ${text}`));
  show($("state"), 
    list(told.backends.map((one) => el("li", {}, `${one.name} `, el("span", { class: "muted" }, one.kind), " ",
      el("span", { class: `pill ${one.ready === "ready" ? "exact" : "bad"}` }, one.ready))), "No backend is configured."),
    el("h3", {}, "Breakers"),
    list(told.breakers.map((one) => el("li", {}, `${one.place} `, el("span", { class: `pill ${one.state}` }, one.state),
      ` ${one.in_flight} in flight, first byte ${time(one.first_byte_seconds)}${one.state === "open" ? `; ${one.last_failure}; asked again in ${one.opens_again_in} s` : ""}`)), "Nobody was asked yet."),
    el("h3", {}, "Configuration"), list(notes, `All in force, ${number(told.tenants)} tenants. ${number(told.answers.entries)} stored answers, ${short(told.answers.bytes)}B in memory.`));
  const engines = Object.entries(told.prefixes);
  show($("prefixes"), ...engines.flatMap(([name, report]) => {
    if (!report) return [el("p", {}, `${name}: the engine does not answer.`)];
    const hot = report.hot.slice(0, 5).map((one) => el("li", {}, `${number(one.saved_tokens)} tokens saved, ${number(one.times)} times: `, el("code", {}, one.ends.slice(-90))));
    const advice = report.findings.slice(0, 5).map((one) => el("li", {}, `${number(one.lost_tokens)} tokens lost in ${number(one.times)} requests: ${one.reason || "prompts part"} after `, el("code", {}, one.before.slice(-60))));
    return [el("p", {}, `${name}: ${number(report.reused_tokens)} of ${number(report.prompt_tokens)} prompt tokens reused (${percent(report.reused_tokens, report.prompt_tokens)}).`),
      list(hot, "No prefix was reused yet."), el("h3", {}, "Advice"), list(advice, "Nothing to mend: no small difference costs anything.")];
  }), ...(engines.length ? [] : [el("p", { class: "muted" }, "No built-in engine is configured; cached tokens of providers are counted above.")]));
}

// --- live requests -------------------------------------------------------------------------------------------------
function requestRow(row) {
  const open = el("button", { type: "button", class: "link", onclick: () => detail(row.number).catch(failed) }, clock(row.at));
  const what = row.part === "answer" ? row.cache : row.part, look = row.part === "answer" ? row.cache : "bad";
  return el("tr", { "data-number": row.number }, el("td", {}, open), el("td", { class: "left" }, row.tenant), el("td", { class: "left" }, row.asked || "–"),
    el("td", { class: "left" }, el("span", { class: `pill ${look}` }, what)), el("td", { class: "left" }, row.reason),
    el("td", {}, el("span", { class: row.status >= 400 ? "pill bad" : "" }, row.status || "–")), el("td", {}, number(row.prompt)), el("td", {}, number(row.cached)),
    el("td", {}, number(row.completion)), el("td", {}, time(row.ttft)), el("td", {}, time(row.seconds)),
    el("td", {}, usd(row.cost)), el("td", {}, usd(row.saved_answer + row.saved_prefix)));
}
const filters = () => ({ tenant: state.tenant, cache: $("f-cache").value, model: $("f-model").value.trim(), request: $("f-request").value.trim() });

// One poll at a time. `newer` fetches on until it meets what is shown, or starts anew where that is too far.
let polling = false;
async function requests(how = "anew") {
  if (how !== "anew" && polling) return;
  const valid = current(), body = $("requests").tBodies[0];
  polling = true;
  try {
    const asked = { ...filters(), limit: how === "newer" ? 200 : 30 };
    if (how === "newer") asked.after = state.newest;
    if (how === "older") asked.before = state.oldest;
    const { rows } = await ask("requests", asked);
    if (!valid()) return;
    if (how === "newer" && rows.length === asked.limit) how = "anew";  // too many came to fill the gap
    if (how === "anew") {
      head($("requests"), ["time", "tenant", "model", "answer", "why", "status", "prompt", "cached", "completion", "first byte", "total", "cost", "saved"], 5);
      state.newest = state.oldest = 0;
      body.replaceChildren();
    }
    const nodes = rows.map(requestRow);
    if (how === "newer") body.prepend(...nodes); else body.append(...nodes);
    while (how === "newer" && body.rows.length > 200) body.lastChild.remove();
    state.newest = Math.max(state.newest, Number(body.firstChild?.dataset.number ?? 0));
    state.oldest = Number(body.lastChild?.dataset.number ?? 0);
    if (how !== "newer") $("older").hidden = rows.length < 30;
  } finally {
    polling = false;
  }
}

const FIELDS = ["tenant", "key", "user", "surface", "asked", "model", "backend", "status", "cache", "reason", "stored", "similarity", "entry", "stream", "prompt", "cached", "written", "completion",
  "avoided_prompt", "avoided_completion", "request"];
async function detail(id) {
  state.opening = 0;
  const row = await ask(`requests/${id}`);
  history.replaceState(null, "", `${location.search}#request=${id}`);
  $("detail-title").textContent = `${row.asked || row.surface} at ${new Date(row.at * 1000).toLocaleString()}`;
  const facts = FIELDS.filter((name) => row[name] !== "" && row[name] != null && row[name] !== 0 && row[name] !== false).flatMap((name) => [el("dt", {}, name), el("dd", {}, String(row[name]))]);
  const money = [["cost", usd(row.cost)], ["of it looking for similar questions", usd(row.lookup)], ["saved by a stored answer", usd(row.saved_answer)], ["saved by cached prefixes", usd(row.saved_prefix)],
    ["first byte", time(row.ttft)], ["total", time(row.seconds)]].flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
  $("detail-body").replaceChildren(
    el("h3", {}, "Why"), el("ul", {}, ...row.why.map((line) => el("li", {}, line))),
    row.entry_question ? el("p", {}, row.cache === "miss" ? "Nearest stored question: " : "Stored question: ", el("q", {}, row.entry_question)) : null,
    el("h3", {}, "Money and time"), el("dl", {}, ...money), el("h3", {}, "Facts"), el("dl", {}, ...facts),
    ...(row.parts.length ? [el("h3", {}, "Other parts of this request"), el("ul", {}, ...row.parts.map((part) => el("li", {}, `${part.part} at ${part.backend || "–"} (${part.model}): ${usd(part.cost)}. ${part.why.join(" ")}`)))] : []));
  if (!$("detail").open) $("detail").showModal();
}

// --- all together --------------------------------------------------------------------------------------------------
function failed(error) {
  if (error instanceof Refused && error.status === 401) return login(error.message);
  const again = !(error instanceof Refused) || error.status >= 500;
  $("status").textContent = again ? `${error.message} – trying again.` : error.message;
}

async function refresh() {
  const asked = range(), valid = current();
  const [all, kinds, quantiles, tenants] = await Promise.all([
    ask("totals", asked), ask("totals", { ...asked, by: "cache,outcome" }), ask("quantiles", asked),
    state.me.admin ? ask("totals", { ...asked, tenant: "", by: "tenant" }) : { rows: [] }]);
  if (!valid()) return;
  const total = all.rows[0] ?? { cost: 0, cold: 0, saved_exact: 0, saved_semantic: 0, saved_prefix: 0 };
  tiles(total, kinds.rows, quantiles.rows);
  $("range-text").textContent = `${new Date(all.from * 1000).toLocaleString()} – ${new Date(all.to * 1000).toLocaleString()}, by ${{ 60: "minute", 3600: "hour", 86400: "day", 604800: "week" }[all.step]}`;
  const names = [...new Set([...tenants.rows.map((row) => row.tenant), state.tenant])].filter(Boolean).sort();
  if (document.activeElement !== $("tenant")) show($("tenant"), el("option", { value: "" }, "all tenants"), ...names.map((name) => el("option", { value: name, selected: name === state.tenant }, name)));
  $("tenant").value = state.tenant;
  const none = !total.parts;
  $("empty").hidden = !none;
  for (const section of document.querySelectorAll(".charted")) section.hidden = none;
  $("main").setAttribute("aria-busy", "false");
  $("status").textContent = "";
  const rest = [groups(), valuable(), budgets(), gateway()];
  if (!none) {
    const [series, waits] = await Promise.all([ask("totals", { ...asked, by: "time,cache" }), ask("quantiles", { ...asked, by: "time" })]);
    if (!valid()) return;
    rest.push(charts(series.rows, waits.rows, total, series));
  }
  await Promise.all(rest);
}

function choose(change) {
  Object.assign(state, change);
  state.asked += 1;
  writeAddress();
  controls();
  Promise.all([refresh(), requests()]).catch(failed);
}

function controls() {
  if (!$("ranges").children.length) {
    $("ranges").append(...Object.keys(RANGES).map((name) => el("button", { type: "button", onclick: () => choose({ range: name, from: null, to: null }) }, name)));
  }
  for (const button of $("ranges").children) button.setAttribute("aria-pressed", String(!state.from && button.textContent === state.range));
  $("scope").textContent = state.me && !state.me.admin ? state.me.tenant : "";
  $("tenant-label").hidden = !(state.me?.admin);
  tabs();
}

function login(message) {
  if (message && state.declined) { $("status").textContent = message; return; }
  $("login-error").textContent = sessionStorage.getItem("hitherto-key") ? message : "";
  if (!$("login").open) $("login").showModal();
}

async function begin() {
  state.me = await ask("me");
  if (!state.me.admin) { state.tenant = ""; writeAddress(); }
  controls();
  if (!state.me.ledger) {
    $("status").textContent = "No ledger is kept here (ledger: false, or its file cannot be used; see /ready).";
    $("main").setAttribute("aria-busy", "false");
    $("tiles").replaceChildren();
    for (const section of document.querySelectorAll(".booked, .charted")) section.hidden = true;
    await Promise.all([budgets(), gateway()]);
    return;
  }
  await Promise.all([refresh(), requests()]);
  if (state.opening) await detail(state.opening);
}

readAddress();
waitingTiles();
const theme = localStorage.getItem("hitherto-theme");
if (theme) document.documentElement.dataset.theme = theme;
$("curl").textContent = `curl ${location.origin}/v1/chat/completions -H 'content-type: application/json' \\\n  -d '{"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'`;
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("hitherto-theme", document.documentElement.dataset.theme);
  if (state.me) refresh().catch(failed);
});
$("tenant").addEventListener("change", () => choose({ tenant: $("tenant").value }));
$("apply").addEventListener("click", () => {
  const seconds = (id) => $(id).value ? new Date($(id).value).getTime() / 1000 : null;
  if (!seconds("from")) return;
  $("custom").open = false;
  choose({ from: seconds("from"), to: seconds("to") });
});
$("key").addEventListener("click", () => { state.declined = false; login(""); });
$("login").addEventListener("close", () => {
  state.declined = $("login").returnValue !== "go";
  if (state.declined) return;
  sessionStorage.setItem("hitherto-key", $("login-key").value.trim());
  $("login-key").value = "";
  state.asked += 1;
  begin().catch(failed);
});
$("detail").addEventListener("close", () => history.replaceState(null, "", location.search || location.pathname));
for (const button of document.querySelectorAll("[data-csv]")) {
  button.addEventListener("click", async () => {
    const [path, query] = button.dataset.csv.split("?");
    try {
      const reply = await fetched(path, { ...Object.fromEntries(new URLSearchParams(query)), ...(path === "totals" ? range() : { tenant: state.tenant }), format: "csv" });
      const link = el("a", { href: URL.createObjectURL(await reply.blob()), download: /filename="(.+)"/.exec(reply.headers.get("content-disposition"))[1] });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    } catch (error) { failed(error); }
    $("export").open = false;
  });
}
const filtered = () => { state.asked += 1; requests().catch(failed); };
for (const id of ["f-cache", "f-model", "f-request"]) $(id).addEventListener("change", filtered);
$("filters").addEventListener("submit", (event) => { event.preventDefault(); filtered(); });
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("older").addEventListener("click", () => requests("older").catch(failed));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") for (const one of document.querySelectorAll("header details[open]")) one.open = false; });
// Each waits for its own end before it is due again: a slow gateway is not asked twice at once.
function every(milliseconds, due, act) {
  setTimeout(async () => {
    if (due()) await act().catch(failed);
    every(milliseconds, due, act);
  }, milliseconds);
}
every(EVERY, () => !document.hidden && !state.declined, () => state.me ? state.me.ledger ? refresh() : Promise.all([budgets(), gateway()]) : begin());
every(LIVE, () => state.me?.ledger && !document.hidden && !state.declined && $("live").checked, () => requests("newer"));
begin().catch(failed);
