const MAX_BYTES = 8 * 1024 * 1024;
let problem = "";
let busy = false;

function show() {
  const [image, hint] = [element.querySelector("img"), element.querySelector(".live-hint")];
  const [error, clear] = [element.querySelector(".live-error"), element.querySelector(".live-clear")];
  const token = /^[\w-]+$/.test(props.value || "") ? props.value : "";
  const address = token ? new URL("live/picture/" + token, document.baseURI).href : "";
  if (image.src !== address) {
    if (address) image.src = address; else image.removeAttribute("src");
  }
  image.hidden = !token;
  hint.hidden = Boolean(token);
  hint.classList.toggle("busy", busy);
  clear.hidden = !token;
  error.textContent = problem;
  error.hidden = !problem;
}

async function send(file) {
  problem = file.size > MAX_BYTES ? "your picture is larger than 8 MiB" : "";
  busy = !problem;
  show();
  if (problem) return;
  try {
    const answer = await fetch(new URL("live/picture", document.baseURI), { method: "POST", body: file });
    const reply = await answer.json();
    problem = reply.error || "";
    if (reply.token) props.value = reply.token;
  } catch {
    problem = "the picture could not be sent: is the demo still running?";
  }
  busy = false;
  show();
}

element.addEventListener("change", (event) => {
  if (event.target.files && event.target.files[0]) send(event.target.files[0]);
  event.target.value = "";
});
element.addEventListener("click", (event) => {
  if (!event.target.closest(".live-clear")) return;
  problem = "";
  props.value = "";
  show();
});
for (const name of ["dragover", "drop"]) {
  element.addEventListener(name, (event) => {
    event.preventDefault();
    const file = event.dataTransfer && event.dataTransfer.files[0];
    if (name === "drop" && file) send(file);
  });
}
document.addEventListener("paste", (event) => {
  const file = event.clipboardData && [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
  if (file && element.offsetParent) send(file);
});
watch("value", () => { problem = ""; show(); });
show();
