// A crosshair on the curves and a tip on the tokens. The page reads the same without it.
(() => {
  const tip = document.getElementById("tip");
  const clean = (text) =>
    String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

  const show = (html, event) => {
    tip.innerHTML = html;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = event.clientX + 14 + box.width < innerWidth - 8;
    const below = event.clientY + 14 + box.height < innerHeight - 8;
    tip.style.left = (right ? event.clientX + 14 : event.clientX - box.width - 14) + "px";
    tip.style.top = (below ? event.clientY + 14 : event.clientY - box.height - 14) + "px";
  };

  for (const svg of document.querySelectorAll("svg.chart")) {
    // Each point: x, y, series, class, stage, step, value, interval.
    const points = JSON.parse(svg.dataset.points);
    const layer = svg.querySelector(".hover");
    const line = layer.querySelector(".cross");
    const view = svg.viewBox.baseVal;
    const clear = () => {
      line.style.visibility = "hidden";
      layer.querySelectorAll("circle").forEach((mark) => mark.remove());
      tip.hidden = true;
    };
    svg.addEventListener("mouseleave", clear);
    svg.addEventListener("mousemove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * view.width;
      const near = points.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best));
      const here = points.filter((p) => p[0] === near[0]);
      clear();
      for (const [name, value] of [["x1", near[0]], ["x2", near[0]], ["y1", 10], ["y2", view.height - 38]])
        line.setAttribute(name, value);
      line.style.visibility = "visible";
      for (const p of here) {
        const mark = document.createElementNS(svg.namespaceURI, "circle");
        for (const [name, value] of [["cx", p[0]], ["cy", p[1]], ["r", 4], ["class", "mark " + p[3]]])
          mark.setAttribute(name, value);
        layer.append(mark);
      }
      const rows = here.map(
        (p) => `<br><i class="${p[3]}"></i>${clean(p[2])} <b>${clean(p[6])}</b> <small>${clean(p[7])}</small>`,
      );
      show(`<small>${clean(near[4])} step ${clean(near[5])}</small>${rows.join("")}`, event);
    });
  }

  const token = (event) => event.target.closest && event.target.closest("[data-t]");
  document.addEventListener("mouseover", (event) => token(event) && show(clean(token(event).dataset.t), event));
  document.addEventListener("mouseout", (event) => {
    if (token(event)) tip.hidden = true;
  });
})();
