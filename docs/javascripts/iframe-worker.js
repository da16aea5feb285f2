// Search on pages that are opened from the disk: browsers start no worker there, so a hidden frame does its work.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inner = this.frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source === inner) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      inner.document.open();
      inner.document.write(`<body><script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = done;
          document.body.appendChild(script);
        })), Promise.resolve());
      <\/script><script src="${url}"><\/script></body>`);
      inner.document.close();
      this.ready = new Promise((resolve) => (inner.onload = resolve));
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
