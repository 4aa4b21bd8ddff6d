"use strict";
// The page can be read without this: it adds the filter, copying, and unfolds everything that is printed.
const form = document.querySelector(".filter");
const text = document.getElementById("text");
const rows = [...document.querySelectorAll(".requirement")];
const content = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

function apply() {
  const words = text.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  const wanted = new Set([...form.querySelectorAll("input:checked")].map((box) => box.value));
  let shown = 0;
  for (const row of rows) {
    const verdicts = row.dataset.verdicts.trim().split(" ");
    row.hidden = !verdicts.some((one) => wanted.has(one)) || (words.length && !words.some((word) => content.get(row).includes(word)));
    shown += !row.hidden;
  }
  for (const chapter of document.querySelectorAll(".chapter")) {
    chapter.hidden = ![...chapter.querySelectorAll(".requirement")].some((row) => !row.hidden);
  }
  document.getElementById("shown").textContent = `${shown} of ${rows.length} requirements`;
}

form.hidden = false;
form.addEventListener("input", apply);
form.addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== text) {
    event.preventDefault();
    text.focus();
  } else if (event.key === "Escape" && document.activeElement === text) {
    text.value = "";
    apply();
  }
});
for (const button of navigator.clipboard ? document.querySelectorAll(".copy") : []) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.dataset.text);
    button.textContent = "Copied";
  });
}
let folded = [];
window.addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("article details:not([open]), #not-run details:not([open])")];
  for (const one of folded) one.open = true;
});
window.addEventListener("afterprint", () => folded.forEach((one) => { one.open = false; }));
apply();
