// Sections: tensors in the page, unpacked on first use.

async function unpacked(section) {
  const stream = new Blob([bytesOf(section.data)]).stream().pipeThrough(new DecompressionStream("gzip"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  return { shape: section.shape, values: numbers(planes, section.type, section.code) };
}

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

// Many numbers share a few codes, so each code is decoded only once.
function decoded(codes, table) {
  const found = new Float32Array(codes.length);
  for (let i = 0; i < found.length; i++) found[i] = table[codes[i]];
  return found;
}

const tableOf = (size, decode) => Float32Array.from({ length: size }, (_, code) => decode(code));
const tables = {};
const signedOf = (most, steps) => (x) => Math.sign(x - 128) * ((x - 128) / steps) ** 2 * most;

function numbers(planes, type, code) {
  if (code.startsWith("sqrt")) return decoded(planes, (tables[code] ||= tableOf(256, (x) => (x / Number(code.slice(5))) ** 2)));
  if (code.startsWith("signed")) return decoded(planes, (tables[code] ||= tableOf(256, signedOf(...code.split(" ").slice(1).map(Number)))));
  if (code === "log") return decoded(planes, (tables.log ||= tableOf(256, (x) => (x ? 2 ** ((x - 128) / 12) : 0))));
  const width = Number(type[1]);
  const bytes = new Uint8Array(planes.length);
  const each = planes.length / width;
  for (let rank = 0; rank < width; rank++)
    for (let i = 0, from = rank * each, to = rank; i < each; i++, from++, to += width) bytes[to] = planes[from];
  if (type === "f4") return new Float32Array(bytes.buffer);
  if (type === "u2") return new Uint16Array(bytes.buffer);
  if (type === "u4") return new Uint32Array(bytes.buffer);
  if (type === "f2") return decoded(new Uint16Array(bytes.buffer), (tables.half ||= tableOf(65536, half)));
  return bytes;
}

function half(bits) {
  const [sign, exponent, fraction] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

// How far a decoded number may be from the one that was stored: half a step of its code.
function errorOf(code, type) {
  const [name, size, steps] = code.split(" ");
  if (name === "sqrt") return (x) => Math.sqrt(Math.abs(x)) / Number(size) + 0.25 / Number(size) ** 2;
  if (name === "signed") return (x) => Math.sqrt(Math.abs(x) * Number(size)) / steps + (0.25 * Number(size)) / steps ** 2;
  if (name === "log") return (x) => x * (2 ** (0.5 / 12) - 1);
  return (x) => (type === "f2" ? Math.abs(x) * 2 ** -11 : 0);
}

class Sections {
  constructor(raw) {
    this.raw = raw;
    this.known = new Map();
  }

  has(name) {
    return name in this.raw;
  }

  shape(name) {
    return this.raw[name].shape;
  }

  error(name) {
    return this.has(name) ? errorOf(this.raw[name].code, this.raw[name].type) : () => 0;
  }

  get(name) {
    if (!this.has(name)) return Promise.resolve(null);
    if (!this.known.has(name)) this.known.set(name, unpacked(this.raw[name]));
    return this.known.get(name);
  }
}
