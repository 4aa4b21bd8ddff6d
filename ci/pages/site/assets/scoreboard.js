// The filters of the scoreboard, and arrow keys between its links. Without this script the whole table is shown.
(() => {
  const form = document.getElementById("filters");
  const table = document.getElementById("cells");
  if (!form || !table) return;

  const groups = [...table.tBodies];
  const rows = groups.flatMap((group) => [...group.rows].filter((row) => !row.classList.contains("chapter")));
  const heads = [...table.tHead.rows[0].cells].slice(1);
  const boxes = [...form.querySelectorAll("[name=engine]")];
  const output = form.querySelector("output");
  const text = new Map(rows.map((row) => [row, `${row.cells[0].textContent} ${row.dataset.text}`.toLowerCase()]));

  function apply() {
    const chosen = new FormData(form);
    const shown = boxes.map((box) => box.checked);
    const words = chosen.get("text").toLowerCase().split(/\s+/).filter(Boolean);
    const kind = chosen.get("kind");
    heads.forEach((head, place) => (head.hidden = !shown[place]));
    let count = 0;
    for (const row of rows) {
      const cells = [...row.cells].slice(1);
      cells.forEach((cell, place) => (cell.hidden = !shown[place]));
      row.hidden = !(
        words.every((word) => text.get(row).includes(word)) &&
        (!chosen.get("chapter") || row.parentElement.dataset.chapter === chosen.get("chapter")) &&
        (!chosen.get("level") || row.dataset.level === chosen.get("level")) &&
        (!kind || cells.some((cell) => !cell.hidden && cell.classList.contains(kind)))
      );
      count += !row.hidden;
    }
    for (const group of groups) {
      group.hidden = [...group.rows].every((row) => row.hidden || row.classList.contains("chapter"));
      group.rows[0].cells[0].colSpan = 1 + shown.filter(Boolean).length;
    }
    const engines = shown.filter(Boolean).length;
    output.value = `${count} of ${rows.length} requirements, ${engines} of ${boxes.length} engines`;
    remember(chosen, engines);
    rove();
  }

  // The address has the filters, so that a view can be shared.
  function remember(chosen, engines) {
    const query = new URLSearchParams();
    for (const name of ["text", "chapter", "level", "kind"]) if (chosen.get(name)) query.set(name, chosen.get(name));
    if (engines < boxes.length) query.set("engines", chosen.getAll("engine").join(","));
    history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}${location.hash}`);
  }

  function recall() {
    const query = new URLSearchParams(location.search);
    for (const name of ["text", "chapter", "level", "kind"]) form.elements[name].value = query.get(name) ?? "";
    if (query.has("engines")) {
      const named = query.get("engines").split(",");
      for (const box of boxes) box.checked = named.includes(box.value);
    }
  }

  // Tab reaches one link of the table; arrow keys lead to the next one in that direction.
  const links = () => [...table.querySelectorAll("a")].filter((link) => link.offsetParent);
  function rove(to = links()[0]) {
    for (const link of table.querySelectorAll("a")) link.tabIndex = link === to ? 0 : -1;
  }

  function next(from, key) {
    const place = (link) => [link.closest("tr").rowIndex, link.closest("td, th").cellIndex];
    const [row, column] = place(from);
    const ways = {
      ArrowRight: ([r, c]) => r === row && c > column,
      ArrowLeft: ([r, c]) => r === row && c < column,
      ArrowDown: ([r, c]) => c === column && r > row,
      ArrowUp: ([r, c]) => c === column && r < row,
    };
    const found = links().filter((link) => ways[key]?.(place(link)));
    return key === "ArrowLeft" || key === "ArrowUp" ? found.at(-1) : found[0];
  }

  table.addEventListener("keydown", (event) => {
    const link = event.target.closest("a");
    const to = link && next(link, event.key);
    if (!to) return;
    event.preventDefault();
    rove(to);
    to.focus();
  });

  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
  for (const button of form.querySelectorAll("[data-engines]")) {
    button.addEventListener("click", () => {
      for (const box of boxes) box.checked = button.dataset.engines === "all";
      apply();
    });
  }
  form.hidden = false;
  recall();
  apply();
})();
