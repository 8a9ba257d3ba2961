// Where it begins. A page that stands alone reads its own data; one under a server is given a source that asks it.

function show(root, manifest, source, against = null) {
  root.headwise?.close();
  root.headwise = new App(root, [{ manifest, source }, ...(against ? [against] : [])]);
  document.documentElement.dataset.ready = "true";
  performance.mark("headwise usable");
  return root.headwise;
}

function sideOf({ manifest, sections }) {
  return { manifest, source: new EmbeddedSource(manifest, new Sections(sections)) };
}

const data = document.getElementById("headwise-data");
window.headwise = { show, sideOf, EmbeddedSource, Sections, Reach };
if (data) {
  const [side, other] = JSON.parse(data.textContent).map(sideOf);
  show(document.getElementById("headwise"), side.manifest, side.source, other);
}
