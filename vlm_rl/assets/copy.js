// Buttons that copy the text of the element before them. A page that was opened as a file has no navigator.clipboard.
document.addEventListener("click", ({ target }) => {
  if (!target.matches("[data-copy]")) return;
  getSelection().selectAllChildren(target.previousElementSibling);
  const said = target.textContent;
  target.textContent = document.execCommand("copy") ? "copied" : "select it and copy";
  setTimeout(() => { target.textContent = said; }, 1500);
});
