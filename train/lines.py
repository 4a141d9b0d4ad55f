"""Files of JSON lines that grow row by row and outlive a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def resume(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, none where it is missing; a last one that is not whole is cut off."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    with path.open("ab") as file:
        file.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]
