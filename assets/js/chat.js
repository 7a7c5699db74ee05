// What the Chat tab does by itself in the browser: attaching files, the microphone and what stands in for it, the words that
// a person typed, and buttons beside messages. Runs after app.js, which owns window.switchboard.
(() => {
  const { words, onChange } = window.switchboard;
  const filled = (key, values) => words[key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
  const composerBox = () => document.querySelector("#composer textarea");
  const hintPlace = () => document.getElementById("attach-hint");
  const modelTakes = () => (hintPlace()?.dataset.takes || "").split(" ").filter(Boolean);

  // The line below the composer: sentences, and controls that belong to them.
  function hint(sentences, ...controls) {
    const place = hintPlace();
    if (!place) return;
    place.replaceChildren();
    for (const sentence of sentences) {
      place.append(Object.assign(document.createElement("p"), { textContent: sentence }));
    }
    place.append(...controls);
  }
  function button(label, run) {
    const made = Object.assign(document.createElement("button"), { type: "button", className: "plain", textContent: label });
    made.addEventListener("click", run);
    return made;
  }

  // Files: those that the model takes go to Gradio's composer, the others are told why not.
  const kindOf = (file) => ["image", "audio"].find((kind) => file.type.startsWith(`${kind}/`)) || "file";
  function accepted(files) {
    const takes = modelTakes();
    const refused = files.filter((file) => !takes.includes(kindOf(file)));
    const taken = ["text", ...takes].map((each) => words[`media.${each}`]).join(words["receipt.and"]);
    hint(refused.map((file) => filled(`attach.no_${kindOf(file)}`, { name: file.name, taken })));
    return files.filter((file) => takes.includes(kindOf(file)));
  }
  function transferOf(files) {
    const transfer = new DataTransfer();
    for (const file of files) transfer.items.add(file);
    return transfer;
  }
  function attach(files) {
    const wanted = accepted(files);
    if (!wanted.length) return;
    const drop = new DragEvent("drop", { dataTransfer: transferOf(wanted), bubbles: true, cancelable: true });
    drop.isChecked = true;
    composerBox().dispatchEvent(drop);
  }

  // They may be dropped anywhere beside the composer too.
  const isOverChat = (event) =>
    !event.isChecked && event.dataTransfer?.types.includes("Files") && composerBox()
    && event.target instanceof Element && event.target.closest("#chat-row");
  const setDropping = (isOver) => document.getElementById("chat-row")?.classList.toggle("dropping", isOver);
  function dragOver(event) {
    const isOver = Boolean(isOverChat(event));
    setDropping(isOver);
    if (!isOver) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = "copy";
  }
  function dropped(event) {
    setDropping(false);
    if (!isOverChat(event)) return;
    event.preventDefault();
    event.stopPropagation();
    attach([...event.dataTransfer.files]);
  }
  function pasted(event) {
    const files = [...(event.clipboardData?.files || [])];
    if (!files.length || !(event.target instanceof Element) || !event.target.closest("#composer")) return;
    event.stopPropagation();
    // Office programs put a picture of their text beside it: the text is what was meant.
    if (event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    attach(files);
  }
  function chosen(event) {
    const input = event.target;
    if (!(input instanceof HTMLInputElement) || input.type !== "file" || !input.closest("#composer")) return;
    const files = [...input.files];
    const wanted = accepted(files);
    if (wanted.length < files.length) input.files = transferOf(wanted).files;
    if (!wanted.length) event.stopPropagation();
  }

  // The microphone. Gradio's recorder says nothing where the browser gives it none.
  const MAX_RECORDING_S = 600;
  const takeFromElsewhere = () => {
    const input = Object.assign(document.createElement("input"), { type: "file", accept: "audio/*" });
    input.setAttribute("capture", "user"); // Phones open their recorder, also where pages may not use the microphone.
    input.addEventListener("change", () => attach([...input.files]));
    const label = Object.assign(document.createElement("label"), { className: "plain", textContent: words["mic.file"] });
    label.append(input);
    return label;
  };
  window.switchboard.microphoneProblem = microphoneProblem;
  async function microphoneProblem() {
    try {
      const permission = await navigator.permissions.query({ name: "microphone" });
      if (permission.state === "denied") return "mic.denied";
    } catch { /* The browser cannot be asked; it will ask by itself. */ }
    const devices = await navigator.mediaDevices.enumerateDevices();
    return devices.some((device) => device.kind === "audioinput") ? "" : "mic.missing";
  }
  async function microphonePressed(event) {
    const isReachable = isSecureContext && navigator.mediaDevices?.getUserMedia;
    if (isReachable && window.MediaRecorder) {
      const problem = await microphoneProblem();
      hint(problem ? [words[problem]] : [], ...(problem ? [takeFromElsewhere()] : []));
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    if (isReachable && window.AudioContext) record();
    else hint([words[isSecureContext ? "mic.unsupported" : "mic.insecure"]], takeFromElsewhere());
  }

  // A recorder that needs no MediaRecorder: samples from Web Audio into a WAV.
  async function record() {
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch (error) {
      hint([words[error.name === "NotFoundError" ? "mic.missing" : "mic.denied"]], takeFromElsewhere());
      return;
    }
    const context = new AudioContext();
    const listener = context.createScriptProcessor(4096, 1, 1);
    const blocks = [];
    const seconds = () => (blocks.length * 4096) / context.sampleRate;
    const time = () => `${Math.floor(seconds() / 60)}:${String(Math.floor(seconds() % 60)).padStart(2, "0")}`;
    const end = (isWanted) => {
      listener.disconnect();
      for (const track of stream.getTracks()) track.stop();
      context.close();
      hint([]);
      if (isWanted) attach([new File([wavOf(blocks, context.sampleRate)], "recording.wav", { type: "audio/wav" })]);
    };
    const stop = button(words["mic.stop"], () => end(true));
    hint([filled("mic.recording", { time: time() })], stop, button(words["mic.cancel"], () => end(false)));
    stop.focus();
    listener.onaudioprocess = ({ inputBuffer }) => {
      blocks.push(new Float32Array(inputBuffer.getChannelData(0)));
      const line = hintPlace()?.querySelector("p");
      if (line) line.textContent = filled("mic.recording", { time: time() });
      if (seconds() >= MAX_RECORDING_S) end(true);
    };
    context.createMediaStreamSource(stream).connect(listener);
    listener.connect(context.destination);
  }
  // 16-bit mono PCM (https://www.mmsp.ece.mcgill.ca/Documents/AudioFormats/WAVE/WAVE.html).
  function wavOf(blocks, rate) {
    const length = blocks.reduce((sum, block) => sum + block.length, 0);
    const view = new DataView(new ArrayBuffer(44 + 2 * length));
    const name = (at, letters) => [...letters].forEach((letter, index) => view.setUint8(at + index, letter.charCodeAt(0)));
    name(0, "RIFF"); view.setUint32(4, 36 + 2 * length, true); name(8, "WAVEfmt ");
    view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true);
    view.setUint32(24, rate, true); view.setUint32(28, 2 * rate, true); view.setUint16(32, 2, true); view.setUint16(34, 16, true);
    name(36, "data"); view.setUint32(40, 2 * length, true);
    let at = 44;
    for (const block of blocks) {
      for (const sample of block) {
        view.setInt16(at, Math.max(-1, Math.min(1, sample)) * 32767, true);
        at += 2;
      }
    }
    return view.buffer;
  }

  // A prompt of the chosen adapter's card goes into the composer, where Ctrl+Z takes it back.
  function write(prompt) {
    const box = composerBox();
    box.focus();
    box.select();
    document.execCommand("insertText", false, prompt);
  }

  // A person's words as typed, beside Gradio's Markdown of them, which the style sheet hides; the label holds the source.
  const LABEL_START = "user's message: ";
  function showTyped() {
    for (const markdown of document.querySelectorAll('#chatbot [data-testid="user"] .md')) {
      const label = markdown.closest("[data-testid]").getAttribute("aria-label") || "";
      const source = label.startsWith(LABEL_START) ? label.slice(LABEL_START.length) : markdown.innerText;
      let typed = markdown.parentElement.querySelector(".typed");
      if (!typed) {
        typed = document.createElement("div");
        typed.className = "typed";
        markdown.after(typed);
      }
      if (typed.textContent !== source) typed.textContent = source;
    }
  }

  // Delete beside each message: a turn's rows of the person stand together, and its buttons are the last one's.
  const BIN = "<svg viewBox='0 0 24 24' aria-hidden='true'><path d='M4 7h16M10 4h4M6 7l1 13h10l1-13M10 11v6M14 11v6'/></svg>";
  function offerDelete() {
    let turn = -1;
    let isOfPerson = false;
    for (const row of document.querySelectorAll("#chatbot .message-row")) {
      const isRowOfPerson = row.classList.contains("user-row");
      if (isRowOfPerson && !isOfPerson) turn += 1;
      isOfPerson = isRowOfPerson;
      const buttons = row.nextElementSibling?.querySelector(".icon-button-wrapper");
      if (!isRowOfPerson || !buttons) continue;
      const isLast = !row.nextElementSibling.nextElementSibling?.classList.contains("user-row");
      let own = buttons.querySelector(".delete-turn");
      if (own && !isLast) own.remove();
      if (!isLast) continue;
      if (!own) {
        own = Object.assign(document.createElement("button"), { type: "button", className: "delete-turn", innerHTML: BIN });
        own.setAttribute("aria-label", words["turn.delete"]);
        own.title = words["turn.delete"];
        buttons.append(own);
      }
      if (own.dataset.turn !== String(turn)) own.dataset.turn = turn;
    }
  }

  addEventListener("click", (event) => {
    const at = (selector) => event.target.closest?.(selector);
    if (at('#composer [data-testid="microphone-button"]')) microphonePressed(event);
    const own = at(".delete-turn");
    if (own) window.switchboard.removeTurn(Number(own.dataset.turn));
    if (at("[data-restore-turn]")) window.switchboard.restoreTurn();
    const prompt = at("[data-prompt]");
    if (prompt) write(prompt.dataset.prompt);
    if (at('#composer [data-testid="submit-button"], #new-conversation')) hint([]);
  }, true);
  addEventListener("dragenter", dragOver, true);
  addEventListener("dragover", dragOver, true);
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) setDropping(false); }, true);
  addEventListener("drop", dropped, true);
  addEventListener("paste", pasted, true);
  addEventListener("change", chosen, true);
  onChange.push(showTyped, offerDelete);
})();
