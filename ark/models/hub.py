"""Downloads checkpoints by their names on the Hugging Face hub. It needs the package
huggingface_hub, which caches the files. Used by `ark serve`, `ark generate`, `ark chat` and
`ark.LLM`.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from ark.errors import ModelError

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
FILES = ("*.json", "*.safetensors", "*.jinja", "additional_chat_templates/*")
"""The files of a checkpoint that ark reads."""


def hub_name(model: str | os.PathLike[str]) -> str | None:
    """Returns `model` if it can be a name on the Hugging Face hub: it has the form of a name
    (owner/name) and is not an existing path. Otherwise returns None.
    """
    name = str(model)
    return name if NAME.fullmatch(name) and not Path(name).exists() else None


def local_directory(model: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint: `model` itself if it is a path, otherwise a directory with the
    hub's files of that name. Missing files are downloaded. Raises ModelError if that fails.
    """
    name = hub_name(model)
    if name is None or importlib.util.find_spec("huggingface_hub") is None:
        return Path(model)  # Checkpoint.open reports a missing path, with a hint
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # errors of the package, of HTTP or of the disk
        cause = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise ModelError(
            f"{name} is not a directory here, and the Hugging Face hub gave no checkpoint of that "
            f"name: {cause}. Check the name and the connection (a private one needs `hf auth "
            f"login`), or download it elsewhere (hf download {name} --local-dir "
            f"{name.partition('/')[2]}) and give the directory."
        ) from None
