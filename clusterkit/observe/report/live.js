// On the dashboard: the page as it is now, every few seconds. Text of a run comes escaped.
(() => {
  const main = document.querySelector("main");
  const every = Number(document.body.dataset.live);
  if (!every) return;
  const show = (text) => {
    const template = document.createElement("template");
    template.innerHTML = text;
    const next = template.content;
    // Parts of the same records stay as they are, with the values that are being read in them.
    const kept = [...main.children].filter((old) => {
      const fresh = old.dataset.version && next.getElementById(old.id);
      // Trajectories are replaced with every step: those that are being read stay until they are left.
      const read = old.id === "rollouts" && old.contains(document.activeElement);
      return fresh && (read || old.dataset.version === fresh.dataset.version);
    });
    const same = kept.some((element) => element.id === "plots");
    // Who reads values or selects text is not disturbed.
    if ((!same && document.querySelector(".tip")) || !document.getSelection().isCollapsed) return;
    for (const element of main.querySelectorAll("details")) {
      next.getElementById(element.id)?.toggleAttribute("open", element.open);
    }
    for (const element of [...main.children]) if (!kept.includes(element)) element.remove();
    for (const old of kept) {
      const fresh = next.getElementById(old.id);
      while (next.firstChild !== fresh) old.before(next.firstChild);
      fresh.remove();
    }
    main.append(next);
    document.dispatchEvent(new Event("renewed"));
  };

  const refresh = async () => {
    const note = document.getElementById("live");
    try {
      const query = new URLSearchParams(location.search);
      query.set("drawn", [...main.children].map((element) => element.dataset.version ?? "").join(" "));
      const answer = await fetch(`/page?${query}`, { cache: "no-store" });
      const text = await answer.text();
      if (!answer.ok) throw new Error(text);
      show(text);
      note.textContent = "live";
      note.className = "";
    } catch (error) {
      note.textContent = `The dashboard does not answer (${error.message}). What is shown is of ${note.dataset.seen}.`;
      note.className = "lost";
      return;
    }
    note.dataset.seen = new Date().toLocaleTimeString();
  };
  setInterval(() => document.hidden || refresh(), every * 1000);
})();
