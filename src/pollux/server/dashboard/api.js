/* Asking the server: the token, requests, and streams. Every request ends by itself after a while. */

const KEY = "pollux-token";
const TIMEOUT_MS = 20000;
let token = remembered(KEY);

/* Called when the server does not know our token: (message, hadToken) => void. */
let onDenied = () => {};
export const whenDenied = listener => {
  onDenied = listener;
};

export function remembered(key) {
  try {
    return localStorage.getItem(key) || "";
  } catch {
    return "";
  }
}

export function remember(key, value) {
  try {
    if (value) localStorage.setItem(key, value);
    else localStorage.removeItem(key);
  } catch {
    /* for this page only, then */
  }
}

export function setToken(value) {
  token = value.trim();
  remember(KEY, token);
}

/* "#token=..." is how `pollux dashboard` passes it: it never leaves the browser, and leaves the address at once. */
export function takeTokenFromAddress() {
  const match = /^#token=([^&]*)/.exec(location.hash);
  if (!match) return false;
  let found = match[1];
  try {
    found = decodeURIComponent(found);
  } catch {
    /* as it stands, then */
  }
  setToken(found);
  history.replaceState(null, "", `${location.pathname}${location.search}#/`);
  return true;
}

export class ApiError extends Error {
  constructor(status, message, known) {
    super(message);
    this.status = status;
    this.known = known;
  }
}

/* Asks for a token, unless there is another one by now. */
function deny(status, message, sent) {
  if (sent === token) onDenied(message, Boolean(sent));
  return new ApiError(status, message);
}

async function request(path, {method = "GET", body, signal} = {}) {
  const headers = {},
    sent = token;
  if (/[^\x21-\x7e]/.test(sent)) throw deny(401, "it holds characters that no token has.", sent); // nor any header
  if (sent) headers.Authorization = `Bearer ${sent}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(`/api/v1${path}`, {
      method,
      headers,
      signal,
      cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(
      0,
      error.name === "TimeoutError" ? "The server did not answer in time." : "The server cannot be reached.",
    );
  }
  if (response.ok) return response;
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    /* no JSON: a proxy, perhaps */
  }
  const message = told?.message ?? `The server answered with ${response.status} ${response.statusText}.`;
  if (response.status === 401 || (response.status === 403 && method === "GET"))
    throw deny(response.status, message, sent);
  throw new ApiError(response.status, message, told?.known);
}

export async function api(path, options = {}) {
  const signals = [AbortSignal.timeout(options.timeoutMs ?? TIMEOUT_MS), ...(options.signal ? [options.signal] : [])];
  const response = await request(path, {...options, signal: AbortSignal.any(signals)});
  return response.status === 204 ? null : response.json();
}

/* A whole answer as a file. */
export async function download(path, {signal, timeoutMs = 120000} = {}) {
  const signals = [AbortSignal.timeout(timeoutMs), ...(signal ? [signal] : [])];
  return (await request(path, {signal: AbortSignal.any(signals)})).blob();
}

export const post = (path, body = {}) => api(path, {method: "POST", body});

/* The text of an answer that goes on, piece by piece, to `take`. Returns when it has ended. Aborts if nothing comes
   for `silenceMs`: a connection may be dead without either side having said so. */
export async function stream(path, take, {signal, silenceMs = 0, onOpen = () => {}} = {}) {
  const silence = new AbortController();
  let timer = null;
  const heard = () => {
    clearTimeout(timer);
    if (silenceMs) timer = setTimeout(() => silence.abort(new DOMException("silent", "TimeoutError")), silenceMs);
  };
  heard();
  try {
    const response = await request(path, {signal: AbortSignal.any([silence.signal, signal])});
    onOpen();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return;
      heard();
      take(value);
    }
  } finally {
    clearTimeout(timer);
    silence.abort(); // also if `take` has thrown: browsers have few connections
  }
}

/* Messages of a text/event-stream out of pieces of it. */
export function eventParser(onMessage) {
  let buffer = "",
    searched = 0;
  return piece => {
    buffer += piece.replaceAll("\r\n", "\n");
    for (;;) {
      const end = buffer.indexOf("\n\n", Math.max(0, searched - 1));
      if (end < 0) {
        searched = buffer.length;
        return;
      }
      const block = buffer.slice(0, end);
      buffer = buffer.slice(end + 2);
      searched = 0;
      let event = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      }
      if (data.length) onMessage(event, data.join("\n"));
    }
  };
}
