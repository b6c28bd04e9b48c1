"""What one would write first: a bare ASGI app under uvicorn that answers with a picture in natural JSON.

Every request base64-encodes the picture, kept in memory, and dumps a dict of the same shape as our server's answer with
the standard library. Run as `bare_app.py PORT TEMPLATES`, where TEMPLATES maps sizes to answers of our server.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import uvicorn


class BareApp:
    """One route; answers by size."""

    def __init__(self, templates: dict[str, dict[str, Any]]) -> None:
        self._templates = templates
        self._pictures = {}
        for size, answer in templates.items():
            link = answer["choices"][0]["message"]["content"][0]["image_url"]
            self._pictures[size] = base64.b64decode(link["url"].partition(",")[2])
            link["url"] = ""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        asked = json.loads(body)
        size = f"{asked['width']}x{asked['height']}"
        template = self._templates[size]
        choice = template["choices"][0]
        part = choice["message"]["content"][0]
        encoded = base64.b64encode(self._pictures[size]).decode()
        part = {**part, "image_url": {"url": f"data:image/png;base64,{encoded}"}}
        choice = {**choice, "message": {**choice["message"], "content": [part]}}
        content = json.dumps({**template, "choices": [choice]}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


if __name__ == "__main__":
    uvicorn.run(
        BareApp(json.loads(Path(sys.argv[2]).read_text())),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        http="httptools",
        loop="uvloop",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )
