"use strict";
/* Draws the charts, sorts tables, switches the theme. All text from records goes through textContent or Vega's text marks. */
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const make = (tag, text) => { const made = document.createElement(tag); if (text !== undefined) made.textContent = text; return made; };

  // Colours of a chart that is saved; on the page the style sheet overrides them.
  const look = (legend) => {
    const font = getComputedStyle(root).getPropertyValue("--sans").trim(), ink = "#1c1e23", muted = "#5d626c";
    return {
      background: legend ? "#ffffff" : "transparent", font, view: { stroke: null }, padding: legend ? 12 : { left: 2, right: 8, top: 6, bottom: 2 },
      axis: { labelColor: muted, titleColor: ink, titleFontWeight: 500, titleFontSize: 12, labelFontSize: 11, gridColor: "#dcdad2", gridOpacity: 0.7,
              domainColor: muted, tickColor: muted, tickSize: 4, labelPadding: 4, titlePadding: 8, tickCount: 6 },
      axisY: { domain: false, ticks: false }, axisX: { grid: false, labelOverlap: true, labelFlush: true }, line: { strokeWidth: 2 },
      legend: legend ? { orient: "bottom", columns: 3, labelLimit: 240, symbolType: "stroke" } : { disable: true },
    };
  };

  const tip = document.getElementById("tip");
  const tooltip = (_handler, event, _item, value) => {
    if (value === null || value === undefined || value === "") { tip.hidden = true; return; }
    const pairs = typeof value === "object" ? Object.entries(value) : [["", value]];
    tip.replaceChildren(...pairs.map(([key, text]) => { const row = make("div"); row.append(make("span", key), make("span", String(text))); return row; }));
    tip.hidden = false;
    const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8), y = event.clientY + 18;
    tip.style.transform = `translate(${Math.max(4, x)}px, ${y + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : y}px)`;
  };
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

  // `ast`: expressions are interpreted, never compiled with eval.
  const embed = (place, spec, legend) => vegaEmbed(place, spec, { ast: true, actions: false, defaultStyle: false, renderer: "svg", tooltip, config: look(legend) });

  const state = new Map(); // figure id -> what is drawn in it
  let focus = "";
  const chosen = (id) => figures[id].variants[state.get(id).variant];

  async function draw(id) {
    const now = state.get(id), charts = chosen(id).charts, turn = ++now.turn;
    const places = [...now.element.querySelectorAll(".chart")];
    for (const [i, chart] of charts.entries()) {
      places[i].style.minHeight = `${chart.spec.height + 45}px`;
      const result = await embed(places[i], chart.spec, false);
      if (turn !== now.turn) { result.finalize(); return; } // another choice was made meanwhile
      if (now.views[i]) now.views[i].finalize();
      now.views[i] = result;
      if (focus) result.view.signal("focus", focus).runAsync();
    }
    now.element.dataset.drawn = String(now.variant);
    now.element.querySelector(".numbers").replaceChildren(now.element.querySelector(".numbers summary"));
    if (now.element.querySelector(".numbers").open) numbers(id);
  }

  function numbers(id) {
    const details = state.get(id).element.querySelector(".numbers");
    if (details.querySelector("table")) return;
    for (const chart of chosen(id).charts) {
      const table = make("table"), head = table.createTHead().insertRow(), body = table.createTBody(), keys = Object.keys(chart.fields);
      for (const key of keys) { const cell = make("th", chart.fields[key]); cell.scope = "col"; head.append(cell); }
      for (const row of chart.spec.data.values) { const line = body.insertRow(); for (const key of keys) line.insertCell().textContent = row[key] ?? ""; }
      const box = make("div"); box.className = "scroll"; box.tabIndex = 0; box.setAttribute("role", "region"); box.setAttribute("aria-label", "Numbers of the chart");
      box.append(table); details.append(box);
    }
  }

  async function save(id) {
    for (const [i, chart] of chosen(id).charts.entries()) {
      const place = make("div"); place.className = "unseen"; document.body.append(place);
      const result = await embed(place, { ...chart.spec, width: 560 }, true);
      const link = make("a"); link.href = await result.view.toImageURL("svg"); link.download = `${id}${i ? `-${i + 1}` : ""}.svg`; link.click();
      result.finalize(); place.remove();
    }
  }

  function bring(name) {
    focus = focus === name ? "" : name;
    for (const button of document.querySelectorAll(".key button")) button.setAttribute("aria-pressed", String(button.dataset.name === focus));
    for (const { views } of state.values()) for (const { view } of views) view.signal("focus", focus).runAsync();
  }

  for (const id of Object.keys(figures)) {
    const element = document.getElementById(id);
    state.set(id, { element, views: [], variant: 0, turn: 0 });
    element.addEventListener("change", (event) => { if (event.target.type === "radio") { state.get(id).variant = Number(event.target.value); draw(id); } });
    element.querySelector(".numbers").addEventListener("toggle", () => numbers(id));
    element.querySelector(".save").addEventListener("click", () => save(id));
    for (const button of element.querySelectorAll(".key button")) button.addEventListener("click", () => bring(button.dataset.name));
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells], body = table.tBodies[0];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.sort;
      const rows = [...body.rows].sort((a, b) => {
        const [one, two] = [key(a), key(b)];
        if (one === "" || two === "") return (one === "") - (two === ""); // what is missing stays last
        const order = column ? Number(one) - Number(two) : one.localeCompare(two);
        return down ? -order : order;
      });
      body.append(...rows);
    }));
  }

  const button = document.getElementById("theme"), night = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme || (night.matches ? "dark" : "light")) === "dark";
  const told = () => button.setAttribute("aria-pressed", String(dark()));
  try { const kept = localStorage.getItem("slimbayes-theme"); if (kept === "dark" || kept === "light") root.dataset.theme = kept; } catch { /* no storage for local files */ }
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark"; told();
    try { localStorage.setItem("slimbayes-theme", root.dataset.theme); } catch { /* the choice lasts as long as the page */ }
  });
  night.addEventListener("change", told); told();

  const contents = document.querySelector(".contents details"), wide = matchMedia("(min-width: 72rem)");
  const unfold = () => { contents.open = wide.matches; };
  wide.addEventListener("change", unfold); unfold();
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.hash.slice(1), link]));
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) if (isIntersecting) for (const [id, link] of links) link.toggleAttribute("aria-current", id === target.id);
  }, { rootMargin: "-10% 0px -80% 0px" });
  for (const id of links.keys()) watcher.observe(document.getElementById(id));
  addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("details.origin, details.gallery")) details.open = true; });

  (async () => {
    for (const id of Object.keys(figures)) {
      // One chart that fails must not take the others with it.
      try { await draw(id); } catch (error) { console.error(id, error); state.get(id).element.querySelector(".panels").append(make("p", "This chart could not be drawn; its numbers are below.")); }
      await new Promise((done) => setTimeout(done));
    }
    root.dataset.ready = "true";
  })();
})();
