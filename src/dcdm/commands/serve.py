"""`dcdm serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI


def serve(
    model: Annotated[Path, Positional],
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    api_key: str | None = None,
    max_tokens: int = 1024,
    max_prompt_tokens: int | None = None,
    max_forwards: int = 4096,
    max_texts: int = 16,
    max_queued: int = 64,
    max_batch: int = 16,
    max_batch_tokens: int = 16_384,
    batch_wait_ms: float = 5.0,
    timeout_seconds: float = 120.0,
    drain_seconds: float = 30.0,
    max_body_bytes: int = 1 << 20,
    log_prompts: bool = False,
    threads: int | None = None,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    dtype: Literal["float32", "bfloat16", "float64"] = "float32",
) -> None:
    """Serve a model: a page to watch it in a browser, and an API that OpenAI's clients understand.

    Ctrl-C or SIGTERM ends it: nothing new is taken, what runs may finish.

    Args:
        model: An exported folder; a run folder or a checkpoint in it is exported to a temporary folder first.
        host: Address to listen on; beyond this machine a key is required.
        port: Port; 0 takes a free one.
        name: The name by which callers ask for the model; by default that of the folder.
        api_key: What callers must show; better given in the environment as DCDM_API_KEY.
        max_tokens: New tokens of one text.
        max_prompt_tokens: Tokens of one prompt; by default what the context has room for.
        max_forwards: Forwards of one text.
        max_texts: Texts of one request (prompts times n).
        max_queued: Texts that may wait; more get 429.
        max_batch: Texts that are computed together.
        max_batch_tokens: Positions that are computed together.
        batch_wait_ms: How long a batch that is not full waits for more.
        timeout_seconds: From a request's arrival to its last token.
        drain_seconds: How long running requests may take after Ctrl-C or SIGTERM.
        max_body_bytes: Size of a request.
        log_prompts: Write prompts and completions into the log.
        threads: PyTorch threads; by default PyTorch's own choice.
        device: Where to compute.
        dtype: Type of the weights.
    """
    import os

    from dcdm.config import ConfigError
    from dcdm.serving.settings import Settings

    require_extra()
    import torch

    from dcdm.distributed import choose_device
    from dcdm.serving import logs
    from dcdm.serving.access import is_loopback
    from dcdm.serving.app import create_app
    from dcdm.serving.loading import load

    settings = Settings(
        api_key=api_key if api_key is not None else os.environ.get("DCDM_API_KEY") or None,
        max_tokens=max_tokens, max_prompt_tokens=max_prompt_tokens, max_forwards=max_forwards,
        max_texts=max_texts, max_queued=max_queued, max_batch=max_batch, max_batch_tokens=max_batch_tokens,
        batch_wait_ms=batch_wait_ms, timeout_seconds=timeout_seconds, max_body_bytes=max_body_bytes,
        log_prompts=log_prompts,
    )  # fmt: skip
    if settings.api_key is None and not is_loopback(host):
        raise ConfigError(f"--host {host} can be reached by others: set DCDM_API_KEY, or give --api-key KEY")
    listening = listen(host, port)
    if threads is not None:
        torch.set_num_threads(threads)
    loaded, tokenizer = load(model, device=choose_device(device), dtype=getattr(torch, dtype))
    app = create_app(loaded, tokenizer, settings, name or model.resolve().name)
    logs.start()
    address, at = listening.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    print(f"dcdm: serving {app.state.served.name!r} on http://{shown}:{at}/ (Ctrl-C ends it)", flush=True)
    run(app, listening, drain_seconds)


def require_extra() -> None:
    """Say what to install if the server's packages are missing."""
    from importlib.util import find_spec

    from dcdm.config import ConfigError

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"dcdm serve needs {', '.join(missing)}: pip install 'dcdm[serve]'")


def listen(host: str, port: int) -> socket.socket:
    """The socket, taken before a model is loaded."""
    import errno
    import socket

    from dcdm.config import ConfigError

    if not 0 <= port < 2**16:
        raise ConfigError(f"--port {port} must lie between 0 and 65535; 0 takes a free one")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    taken = socket.socket(family, kind)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
        taken.listen(2048)
    except OSError as error:
        taken.close()
        advice = "another program listens there; choose another --port, or 0 for a free one"
        raise ConfigError(
            f"--port {port} on {host}: {advice if error.errno == errno.EADDRINUSE else error.strerror}"
        ) from error
    return taken


def run(app: FastAPI, listening: socket.socket, drain_seconds: float) -> None:
    """Serve until a signal comes; then take nothing new and let the running requests finish."""
    import asyncio
    import gc

    gc.collect()
    gc.freeze()  # what is loaded stays: without it, full collections find what requests left behind too seldom
    asyncio.run(server_of(app, drain_seconds).serve([listening]))


def server_of(app: FastAPI, drain_seconds: float) -> Any:
    """uvicorn's server, which tells the application when it is asked to end."""
    import asyncio
    import contextlib
    import threading
    from collections.abc import Iterator

    import uvicorn

    from dcdm.files import stops_handled_by

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            app.state.scheduler.draining = True
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: Any = None) -> None:
            asyncio.get_running_loop().call_later(drain_seconds, app.state.scheduler.refuse_all)
            await super().shutdown(sockets)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            if threading.current_thread() is not threading.main_thread():  # who started it ends it
                yield
                return
            with stops_handled_by(self.handle_exit):
                yield

    return Server(
        uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, lifespan="on",
            timeout_graceful_shutdown=int(drain_seconds) + 5, limit_concurrency=1024,
            h11_max_incomplete_event_size=1 << 16,
        )
    )  # fmt: skip
