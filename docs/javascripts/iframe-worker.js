// Browsers start no workers for pages opened from the file system. There, a hidden frame takes the place of the
// worker that runs the search.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = frame.contentWindow;
      const pass = (target, data) => target.dispatchEvent(new MessageEvent("message", { data }));
      scope.postMessage = (data) => pass(this, data);
      const script = scope.document.createElement("script");
      const loaded = new Promise((done) => Object.assign(script, { src: new URL(url, location.href).href, onload: done }));
      scope.document.body.append(script);
      this.postMessage = (data) => loaded.then(() => pass(scope, data));
    }
  };
}
