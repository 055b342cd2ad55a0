"""A headless Chromium for tests, driven by chromedriver's WebDriver protocol."""

import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request

BINARY = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
_FLAGS = (
    *("headless", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"),
    *("disable-background-networking", "disable-component-update", "window-size=1400,1100"),
)
_PATIENCE = 600  # Seconds for any answer: a machine may be busy.


class Browser:
    """One window. It asks nobody but the pages that it opens; the profile is new."""

    def __init__(self, profile):
        # Chromium refuses its sandbox to root, as whom containers run.
        arguments = [*_FLAGS, f"user-data-dir={profile}", *["no-sandbox"] * (os.geteuid() == 0)]
        self._driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for line in self._driver.stdout:
            if found := re.search(r"successfully on port (\d+)", line):
                break
        # Proxies of the environment are not for this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._root = f"http://127.0.0.1:{found[1]}/session"
        options = {"binary": BINARY, "args": [f"--{flag}" for flag in arguments]}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "timeouts": {"script": 1000 * _PATIENCE, "pageLoad": 1000 * _PATIENCE},
        }
        session = self._call("", {"capabilities": {"alwaysMatch": wanted}})
        self._root += f"/{session['sessionId']}"

    def _call(self, path, body=None, method="POST"):
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self._root + path, data, method=method)
        try:
            with self._opener.open(request, timeout=_PATIENCE) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(json.loads(error.read())["value"]["message"]) from None

    def open(self, url):
        """Loads a page; its address is left first, as a change of the fragment loads nothing."""
        self._call("/url", {"url": "about:blank"})
        self.logs("browser"), self.logs("performance")
        self._call("/url", {"url": url})

    def run(self, script, *arguments):
        """What a function body returns, or a promise of it."""
        return self._call("/execute/sync", {"script": script, "args": arguments})

    def press(self, *keys):
        """Keys, one after the other."""
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def point(self, x, y, *, click=False):
        """Moves the mouse, in CSS pixels of the window, and perhaps clicks."""
        steps = [{"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0}]
        if click:
            steps += [{"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp")]
        mouse = {"type": "pointer", "id": "mouse", "actions": steps}
        self._call("/actions", {"actions": [mouse]})

    def resize(self, width, height):
        """Shows pages as in a window of this size, which may be as narrow as a phone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        self._call("/goog/cdp/execute", command)

    def logs(self, kind):
        """What was logged since last asked, of "browser" or "performance"."""
        return self._call("/se/log", {"type": kind})

    def requests(self):
        """The addresses that were asked for since last asked, beside those inside the page."""
        events = [json.loads(entry["message"])["message"] for entry in self.logs("performance")]
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent]

    def close(self):
        """Ends the browser and its driver."""
        try:
            self._call("", method="DELETE")
        finally:
            self._driver.terminate()
            self._driver.wait()
            self._driver.stdout.close()
