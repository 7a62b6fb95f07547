"use strict";
// In tables of class "sortable", a click on the button of a column sorts by the data-value of its cells.

function compareValues(one, other) {
  const difference = Number(one) - Number(other);
  if (Number.isFinite(difference)) return difference;
  return one.localeCompare(other, undefined, { numeric: true });
}

function sortTable(table, column, descending) {
  const body = table.tBodies[0];
  const value = (row) => row.cells[column].dataset.value;
  const rows = [...body.rows].sort((one, other) => compareValues(value(one), value(other)) * (descending ? -1 : 1));
  body.append(...rows);
  [...table.tHead.rows[0].cells].forEach((header, index) => {
    if (index === column) header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else header.removeAttribute("aria-sort");
  });
}

document.addEventListener("click", (event) => {
  const header = event.target.closest(".sortable thead th");
  if (!header || !event.target.closest("button")) return;
  // numbers are sorted from the largest down first, names from A to Z
  const sorted = header.getAttribute("aria-sort");
  const first = header.classList.contains("text") ? "ascending" : "descending";
  const descending = sorted ? sorted === "ascending" : first === "descending";
  sortTable(header.closest("table"), header.cellIndex, descending);
});
