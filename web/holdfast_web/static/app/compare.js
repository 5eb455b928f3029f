// The comparison page: shows the values at the pointer. The page itself, with its curves, comes from the server.

const figures = (value) => (Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4))));

function position(value, axis) {
  if (axis === "iteration") return `iteration ${Math.round(value).toLocaleString("en")}`;
  if (axis === "elapsed") return `after ${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  return new Date(value * 1000).toISOString().slice(0, 19).replace("T", " ");
}

/** Return the height of the point of a curve next to a place, both in the units of the viewBox; null if far. */
function heightAt(group, place) {
  let best = null;
  for (const line of group.querySelectorAll("polyline")) {
    for (const { x, y } of line.points) if (!best || Math.abs(x - place) < Math.abs(best.x - place)) best = { x, y };
  }
  return best && Math.abs(best.x - place) < 20 ? best.y : null;
}

function start(figure) {
  const plot = figure.querySelector(".compare-plot");
  if (!plot) return;
  const [cursor, output] = [plot.querySelector(".cursor"), figure.querySelector("output")];
  const [left, right] = figure.dataset.x.split(" ").filter(Boolean).map(Number);
  const [low, high] = figure.dataset.y.split(" ").map(Number);
  const valueOf = (share) => ("log" in figure.dataset ? low * (high / low) ** share : low + (high - low) * share);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    const values = [...plot.querySelectorAll("g[data-name]")].flatMap((group) => {
      const height = heightAt(group, share * 1000);
      return height === null ? [] : [`${group.dataset.name} ${figures(valueOf(1 - height / 1000))}`];
    });
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, `${100 * share}%`);
    cursor.setAttribute("visibility", "visible");
    output.textContent = [position(left + (right - left) * share, figure.dataset.axis), ...values].join(" · ");
  });
  plot.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    output.textContent = "";
  });
}

document.querySelectorAll("[data-compare]").forEach(start);
