"""`dcdm serve`."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from dcdm.commands.options import (
    AdapterOption,
    CompileOption,
    DeviceOption,
    DtypeOption,
    at_least_one,
    compute_on,
    load_writer,
)
from dcdm.config import ConfigError, require
from dcdm.serving.settings import Settings, check_names

Limits = Annotated[Settings, arg(name="")]
"""A flag for every field."""
DEFAULT_LIMITS = Settings()

KERNELS = "32"
"""Kernels that oneDNN keeps, one for each shape that requests lead to; of its own default, 1024, memory grows."""

EXAMPLES = (
    "dcdm serve",
    "dcdm serve runs/first",
    "dcdm serve base --adapter adapters",
    "dcdm serve exported/small exported/large",
    "DCDM_API_KEY=secret dcdm serve exported --host 0.0.0.0 --port 8000",
)


def serve(
    model: Annotated[tuple[Path, ...], Positional, arg(metavar="[MODEL...]")] = (),
    adapter: AdapterOption = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    threads: int | None = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "fp32",
    compile: CompileOption = False,
) -> None:
    """Serve models: a page to watch them in a browser, and an API that OpenAI's clients understand.

    Ctrl-C, SIGTERM or SIGHUP stops it: no new requests are taken, running ones may finish.

    Args:
        model: Exported folders, run folders, checkpoints in one, or names that `dcdm models` lists. Requests that
            name no model get the first. By default the model that comes with dcdm.
        host: Address to listen on; beyond this machine a key is required.
        port: Port; 0 takes a free one.
        name: The name by which callers ask for the model, by default that of its folder; of several models their
            names with commas between.
        threads: PyTorch threads; by default PyTorch's own choice.
    """
    import os

    require_packages()
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KERNELS)
    import torch

    from dcdm.serving.app import create_app_for
    from dcdm.serving.monitoring import start_logging
    from dcdm.serving.served import ServedModel
    from dcdm.serving.server import is_loopback, listen, serve_app
    from dcdm.shipped import card_of, default

    key = limits.api_key if limits.api_key is not None else os.environ.get("DCDM_API_KEY") or None
    settings = replace(limits, api_key=key)
    if settings.api_key is None and not is_loopback(host):
        raise ConfigError(f"--host {host} can be reached by others: set DCDM_API_KEY, or give --api-key KEY")
    model = model or (Path(default()),)
    names = [path.resolve().name for path in model] if name is None else name.split(",")
    if len(names) != len(model):
        raise ConfigError(f"--name gives {len(names)} names to {len(model)} models; put commas between them")
    check_names(names)  # before any model is loaded
    at_least_one(threads=threads)
    listening = listen(host, port)
    if threads is not None:
        torch.set_num_threads(threads)
    compute_on(device, dtype)  # refused before anything is loaded
    if adapter is not None and len(model) > 1:
        raise ConfigError("--adapter belongs to one model; serve adapted models by their own folders")
    served = []
    for path, called in zip(model, names, strict=True):
        loaded, tokenizer = load_writer(path, device, dtype, adapter, compile)
        card = card_of(path)
        # a shipped model has the same name on every machine; of folders, others need not know where homes are
        folder = str(path.resolve()) if is_loopback(host) and path.exists() else str(path)
        about = card.sentence if card else None
        served.append(ServedModel(loaded, tokenizer, called, settings, folder, about, language_of(path)))
        if card is not None:
            print(f"dcdm: {card.name}: {card.sentence}", flush=True)
    app = create_app_for(served)
    start_logging()
    address, bound_port = listening.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    shown_names = ", ".join(map(repr, names))
    print(f"dcdm: serving {shown_names} on http://{shown}:{bound_port}/ (Ctrl-C stops it)", flush=True)
    serve_app(app, listening)


def language_of(model: Path) -> str:
    """The language of a model's examples, by what its card or its run says that it was trained on."""
    from dcdm.shipped import card_of, folder_of
    from dcdm.training.run import stored_settings

    card, folder = card_of(model), folder_of(model)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    settings = None if card is not None else stored_settings(run)
    read = str(card.trained_on["source"] if card else settings.data.sources if settings else ())
    return "python" if re.search(r"python|stdlib|\.py\b", read, re.IGNORECASE) else "english"


def require_packages() -> None:
    """Say what to install if the server's packages are missing."""
    needed = ("fastapi", "uvicorn", "prometheus_client")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    require(
        not missing, f"dcdm serve needs {', '.join(missing)}: pip install -e '.[serve]' in the checkout of dcdm"
    )
