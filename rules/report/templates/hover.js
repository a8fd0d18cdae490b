// Shows the numbers under the pointer. The page is complete without it.
for (const box of document.querySelectorAll(".frame")) {
  const held = box.parentElement.querySelector("script.points");
  if (!held) continue;
  const lines = JSON.parse(held.textContent);
  const plot = box.querySelector(".plot");
  const first = Number(box.dataset.first), last = Number(box.dataset.last);
  const cursor = document.createElement("div"), tip = document.createElement("div");
  cursor.className = "cursor";
  tip.className = "tip";
  const nearest = (steps, wanted) => {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low > 0 && wanted - steps[low - 1] < steps[low] - wanted ? low - 1 : low;
  };
  plot.addEventListener("pointermove", (event) => {
    const area = plot.getBoundingClientRect(), outer = box.getBoundingClientRect();
    const wanted = first + (event.clientX - area.left) / area.width * (last - first);
    const near = (last - first) / 60;
    let step = null;
    const rows = [];
    for (const line of lines) {
      let at = line.steps.length ? nearest(line.steps, wanted) : -1;
      let found = at < 0 ? null : [line.steps[at], line.values[at]];
      for (const bad of line.bad) if (!found || Math.abs(bad[0] - wanted) < Math.abs(found[0] - wanted)) found = bad;
      if (!found || Math.abs(found[0] - wanted) > near) continue;
      if (step === null || Math.abs(found[0] - wanted) < Math.abs(step - wanted)) step = found[0];
      rows.push(line.name + " " + found[1]);
    }
    if (step === null) { cursor.remove(); tip.remove(); return; }
    tip.replaceChildren();
    for (const text of ["step " + step.toLocaleString("en"), ...rows]) {
      const row = document.createElement("div");
      row.textContent = text;
      tip.append(row);
    }
    const x = area.left - outer.left + (step - first) / (last - first) * area.width;
    box.append(cursor, tip);
    cursor.style.left = x + "px";
    cursor.style.height = area.height + "px";
    tip.style.left = (x + 10 + tip.offsetWidth > outer.width ? Math.max(0, x - 10 - tip.offsetWidth) : x + 10) + "px";
  });
  plot.addEventListener("pointerleave", () => { cursor.remove(); tip.remove(); });
}
