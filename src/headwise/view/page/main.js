// The entry point. A page without a server reads its own data; the live page calls show with a source that asks the server.

function show(root, manifest, source, against = null) {
  root.headwise?.close();
  root.headwise = new App(root, [{ manifest, source }, ...(against ? [against] : [])]);
  document.documentElement.dataset.ready = "true";
  performance.mark("headwise usable");
  return root.headwise;
}

function sideOf({ manifest, sections }) {
  return { manifest, name: manifest.name, source: new EmbeddedSource(manifest, new Sections(sections)) };
}

const data = document.getElementById("headwise-data");
window.headwise = { show, sideOf, EmbeddedSource, Sections, Reach, wordOf, weightText, Scale };
if (data) {
  const [side, other] = JSON.parse(data.textContent).map(sideOf);
  show(document.getElementById("headwise"), side.manifest, side.source, other);
}
