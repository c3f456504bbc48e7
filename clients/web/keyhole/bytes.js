/**
 * Bytes, texts and errors: what every other module of this device uses.
 *
 * Numbers of binary messages are little-endian (docs/wire.md). Keys are whole numbers below 2^31, so
 * that shifts of JavaScript hold them: a table with more is refused where its manifest is read.
 */

/** An error of one line with four facts, whose `kind` is the service's word for it. */
export class KeyholeError extends Error {
  constructor(kind, wrong, { got, expected, fix }) {
    super(`${wrong}: got ${got}; expected ${expected}; ${fix}`);
    this.name = "KeyholeError";
    this.kind = kind;
  }
}

const UTF8 = new TextEncoder();

/** Returns the UTF-8 bytes of a text. */
export function utf8(text) {
  return UTF8.encode(text);
}

/** Returns one array of bytes for several, one behind the other. */
export function concat(...pieces) {
  const whole = new Uint8Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}

/** Returns bytes as text of two hex digits each. */
export function hex(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Returns the bytes of a text of hex digits. */
export function unhex(text) {
  if (text.length % 2 || /[^0-9a-f]/.test(text)) {
    throw new KeyholeError("InputError", "a text is not hexadecimal", {
      got: `${text.length} characters`,
      expected: "an even number of the digits 0 to 9 and a to f",
      fix: "check where it was copied from",
    });
  }
  return Uint8Array.from({ length: text.length / 2 }, (_, i) =>
    Number.parseInt(text.slice(2 * i, 2 * i + 2), 16),
  );
}

/** Returns whether two arrays hold the same bytes. */
export function areEqual(one, other) {
  return one.length === other.length && one.every((byte, i) => byte === other[i]);
}

/** Returns bytes as a view, to read numbers from them. */
export function view(bytes) {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

/** Returns unsigned numbers, each in so many bytes: `pack([4, 7], [8, 1])` has 12. */
export function pack(...fields) {
  const out = new Uint8Array(fields.reduce((sum, [width]) => sum + width, 0));
  const target = view(out);
  let at = 0;
  for (const [width, value] of fields) {
    if (width === 8) target.setBigUint64(at, BigInt(value), true);
    else if (width === 4) target.setUint32(at, value, true);
    else if (width === 2) target.setUint16(at, value, true);
    else target.setUint8(at, value);
    at += width;
  }
  return out;
}

/** Returns whole numbers as 8 bytes each: signed, as keys are. */
export function packKeys(keys) {
  const out = new Uint8Array(8 * keys.length);
  const target = view(out);
  keys.forEach((key, i) => target.setBigInt64(8 * i, BigInt(key), true));
  return out;
}

/** Returns numbers as float32, whatever the byte order of this machine. */
export function packFloats(numbers) {
  const out = new Uint8Array(4 * numbers.length);
  const target = view(out);
  numbers.forEach((number, i) => target.setFloat32(4 * i, number, true));
  return out;
}

/** Returns the bytes of base64, with or without the letters of URLs and padding. */
export function unbase64(text) {
  const plain = atob(text.replace(/-/g, "+").replace(/_/g, "/"));
  return Uint8Array.from(plain, (letter) => letter.charCodeAt(0));
}

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
  return value;
});

/** Returns the CRC-32 of bytes, as zlib computes it. */
export function crc32(bytes) {
  let value = 0xffffffff;
  for (const byte of bytes) value = CRC_TABLE[(value ^ byte) & 255] ^ (value >>> 8);
  return (value ^ 0xffffffff) >>> 0;
}

/** Returns bytes with their CRC-32 behind them. */
export function withCrc(bytes) {
  return concat(bytes, pack([4, crc32(bytes)]));
}
