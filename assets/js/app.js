// What the page does by itself: the theme button, following a growing answer, confirmations. The Chat tab's
// own script is chat.js. Words come from window.switchboardWords, which the server fills in.
(() => {
  // The browser's first language that there are words for; all its regions share them.
  const tables = window.switchboardWords;
  const primary = (tag) => tag.toLowerCase().split("-")[0];
  const wanted = (navigator.languages || [navigator.language]).map(primary);
  const known = wanted.find((tag) => Object.keys(tables).some((table) => primary(table) === tag));
  const words = tables[Object.keys(tables).find((table) => primary(table) === known) || "en"];
  const NEAR_BOTTOM_PX = 60;
  const whenReady = (run) => (document.body ? run() : addEventListener("DOMContentLoaded", run));

  // A theme chosen by hand wins over the system's; Gradio's own ?__theme= wins over both.
  const isForced = new URLSearchParams(location.search).has("__theme");
  let stopKeeping = () => {};
  const stored = localStorage.getItem("switchboard-theme");
  // Gradio sets the class itself while it starts, so the choice is put back until the page stands.
  function keepTheme() {
    if (!stored || isForced) return;
    const apply = () => document.body.classList.toggle("dark", stored === "dark");
    apply();
    const observer = new MutationObserver(() => {
      if (document.body.classList.contains("dark") !== (stored === "dark")) apply();
    });
    observer.observe(document.body, { attributes: true, attributeFilter: ["class"] });
    stopKeeping = () => observer.disconnect();
  }
  function toggleTheme() {
    stopKeeping();
    const isDark = document.body.classList.toggle("dark");
    localStorage.setItem("switchboard-theme", isDark ? "dark" : "light");
  }

  // Follow the answer while the reader is at its end; leave the reader alone who has scrolled up.
  let followed = null;
  function follow(log) {
    if (log === followed) return;
    followed = log;
    let isAtEnd = true;
    let numQuestions = 0;
    log.addEventListener("scroll", () => {
      isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_BOTTOM_PX;
    });
    const toEnd = () => {
      const count = log.querySelectorAll('[data-testid="user"]').length;
      if (count > numQuestions) isAtEnd = true;
      numQuestions = count;
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    };
    new MutationObserver(toEnd).observe(log, { childList: true, subtree: true, characterData: true });
    new ResizeObserver(toEnd).observe(log.firstElementChild || log);
  }

  async function hintAtRecorder(recorder) {
    // Gradio's recorder says nothing when the browser gives it no microphone.
    const problem = words[isSecureContext && navigator.mediaDevices ? await window.switchboard.microphoneProblem() : "mic.insecure"] || "";
    let place = recorder.querySelector(".recorder-hint");
    if (!place && problem) {
      place = recorder.appendChild(document.createElement("p"));
      place.className = "recorder-hint";
      place.setAttribute("role", "status");
    }
    if (place) place.textContent = problem;
  }
  function recorderPressed(recorder, pressed) {
    if (pressed.closest('[data-testid="source-select"] [aria-label="Record audio"], .record-button')) hintAtRecorder(recorder);
    else if (pressed.closest("button")) recorder.querySelector(".recorder-hint")?.remove();
  }

  // What appears in the corner has Gradio's own English word for its kind as its title.
  function titleToasts() {
    for (const kind of ["warning", "error", "success"]) {
      const title = document.querySelector(`.toast-title.${kind}`)?.firstChild;
      const text = `${words[`toast.${kind}`]} `;
      if (title && title.data !== text) title.data = text;
    }
  }
  // A hint answers what was pressed last: the next press, or another tab, puts it away.
  function dropHints() {
    document.querySelector('.toast-body.warning [data-testid="toast-close"]')?.click();
  }

  // A folder dropped where adapters are added: its files are taken as if they had been dropped one by one. Of a training run's
  // folder, only what an adapter may consist of is sent, not its optimizer.
  const BELONGS = /(\.json|\.safetensors|\.txt|\.model|\.jinja)$|^adapter_model\./;
  const entriesOf = (folder) => new Promise((resolve, reject) => {
    const reader = folder.createReader();
    const found = [];
    const read = () => reader.readEntries((batch) => {
      if (!batch.length) return resolve(found);
      found.push(...batch);
      read();
    }, reject);
    read();
  });
  const fileOf = (entry) => new Promise((resolve, reject) => { entry.file(resolve, reject); });
  async function filesOf(entry) {
    if (entry.isFile) return [await fileOf(entry)];
    const inside = await entriesOf(entry);
    const files = inside.filter((each) => each.isFile && BELONGS.test(each.name));
    const isAdapter = files.some((each) => each.name === "adapter_config.json");
    const deeper = isAdapter ? [] : inside.filter((each) => each.isDirectory);
    return (await Promise.all([...files, ...deeper].map(filesOf))).flat();
  }
  async function dropFolder(event) {
    const box = event.target.closest?.("#adapter-upload");
    const entries = box ? [...event.dataTransfer?.items ?? []].map((item) => item.webkitGetAsEntry?.()).filter(Boolean) : [];
    if (!entries.some((entry) => entry.isDirectory)) return;
    event.preventDefault();
    event.stopPropagation();
    const files = new DataTransfer();
    for (const file of (await Promise.all(entries.map(filesOf))).flat()) files.items.add(file);
    const input = box.querySelector("input[type=file]");
    if (!input || !files.files.length) return;
    input.files = files.files;
    input.dispatchEvent(new Event("change", { bubbles: true }));
  }

  // Names for the few controls that Gradio leaves without one.
  function nameControls() {
    document.querySelector("#composer textarea:not([aria-label])")?.setAttribute("aria-label", words["chat.composer"]);
    // A place for files is named by the words it shows.
    for (const drop of document.querySelectorAll("button.upload-container[aria-label]")) drop.removeAttribute("aria-label");
    // Gradio calls the examples a list but has no items in it.
    document.querySelector('#chatbot .examples[role="list"]')?.setAttribute("role", "group");
    for (const arrow of document.querySelectorAll("#chatbot .thought-group .arrow:not([aria-hidden])")) {
      arrow.setAttribute("aria-hidden", "true");
      arrow.setAttribute("tabindex", "-1");
    }
  }

  // A segment's time plays that stretch of the recording; a second press, or its end, stops it.
  let playing = null;
  function stopPlaying() {
    playing?.audio.pause();
    playing?.button().forEach((button) => button.classList.remove("playing"));
    playing = null;
  }
  function playSegment(pressed) {
    const { playFrom, playTo } = pressed.dataset;
    const audio = pressed.closest(".tabitem")?.querySelector("audio[src]");
    const isSame = playing?.from === playFrom;
    stopPlaying();
    if (!audio || isSame) return;
    // The list may be drawn again while it plays: buttons are found by their time.
    const button = () => document.querySelectorAll(`[data-play-from="${playFrom}"]`);
    playing = { audio, button, from: playFrom };
    audio.currentTime = Number(playFrom);
    audio.play().then(() => button().forEach((each) => each.classList.add("playing")), stopPlaying);
    audio.ontimeupdate = () => { if (playing && audio.currentTime >= Number(playTo)) stopPlaying(); };
    audio.onended = stopPlaying;
  }

  // Lists are drawn anew while a person goes through them with the keyboard. Gradio uses the old elements again, so that the
  // focus may find itself on another row's button: the same button gets it back.
  let focused = null;
  function noteFocus(event) {
    const button = event.target.closest?.("button[data-act], button[data-vote], button[data-play-from], .words[tabindex]");
    const name = (value) => CSS.escape(value ?? "");
    const marks = button && [...button.attributes].filter(({ name: key }) => /^data-(act|name|value|vote|play-from)$/.test(key));
    const place = button?.closest("[data-lora], [data-key]");
    const own = place ? `[data-${place.dataset.lora ? "lora" : "key"}="${name(place.dataset.lora ?? place.dataset.key)}"] ` : "";
    const root = button?.closest("[id]:not([id^='html-'])"); // the others are Gradio's own, made at random
    focused = root && {
      button,
      selector: `#${name(root.id)} ${own}${button.matches(".words") ? ".words" : "button"}${marks.map(({ name: key, value }) => `[${key}="${name(value)}"]`).join("")}`,
    };
  }
  function keepFocus() {
    if (!focused || ![document.body, focused.button].includes(document.activeElement)) return;
    if (focused.button.isConnected && focused.button.matches(focused.selector)) return;
    const again = document.querySelector(focused.selector);
    if (again) again.focus({ preventScroll: true });
  }

  // Examples of programs name the address that this page was reached by.
  function fillAddresses() {
    for (const place of document.querySelectorAll("[data-address]:empty")) {
      place.textContent = new URL(".", location.href).href.replace(/[?#].*$/, "");
    }
  }
  async function copyCode(button) {
    const code = button.parentElement.querySelector("code");
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = words["status.copied"];
      setTimeout(() => { button.textContent = label; }, 1500);
    } catch { // Without https there is no clipboard: the text is marked, ready for the keyboard.
      getSelection().selectAllChildren(code);
    }
  }

  function confirmAction(title, body, yes) {
    const dialog = document.createElement("dialog");
    dialog.className = "confirm";
    const add = (parent, tag, content, attributes = {}) => {
      const node = parent.appendChild(Object.assign(document.createElement(tag), attributes));
      node.textContent = content;
      return node;
    };
    add(dialog, "h2", title);
    for (const paragraph of body.split("\n")) add(dialog, "p", paragraph);
    const form = add(dialog, "form", "", { method: "dialog" });
    add(form, "button", words["adapters.cancel"], { value: "cancel", autofocus: true });
    add(form, "button", yes, { value: "yes", className: "danger" });
    document.body.append(dialog);
    dialog.showModal();
    return new Promise((resolve) => {
      dialog.addEventListener("close", () => {
        dialog.remove();
        resolve(dialog.returnValue === "yes");
      });
    });
  }

  // `onChange` runs whenever the page has changed; `words` are those of the visitor's language.
  window.switchboard = { confirm: confirmAction, words, onChange: [] };

  addEventListener("click", (event) => {
    if (event.target.closest("[data-theme-toggle]")) toggleTheme();
    const recorder = event.target.closest("#transcribe-audio, #compare-audio");
    if (recorder) recorderPressed(recorder, event.target);
    if (event.target.closest('[role="tab"], #transcribe-run, #compare-run')) dropHints();
    const time = event.target.closest("[data-play-from]");
    if (time) playSegment(time);
    const copy = event.target.closest("button[data-copy]");
    if (copy) copyCode(copy);
  }, true);

  addEventListener("focusin", noteFocus, true);
  addEventListener("pointerdown", () => { focused = null; }, true);
  addEventListener("drop", dropFolder, true);

  const watch = () => {
    const log = document.querySelector('#chatbot [role="log"]');
    if (log) follow(log);
    nameControls();
    titleToasts();
    fillAddresses();
    for (const run of window.switchboard.onChange) run();
    keepFocus();
  };
  whenReady(() => {
    keepTheme();
    watch();
    new MutationObserver(watch).observe(document.body, {
      childList: true, subtree: true, characterData: true, attributes: true, attributeFilter: ["aria-label"],
    });
  });
})();
