"""`megatoken serve MODEL`: serve a model over HTTP, with OpenAI's API and a chat page."""

from argparse import Namespace
from pathlib import Path

from megatoken.base.console import Console, format_memory
from megatoken.base.errors import ConfigError, import_extra
from megatoken.cli import Data
from megatoken.distributed.signals import handle_signals

HELP = "serve a model over HTTP: an OpenAI-compatible API and a chat page"
EXAMPLE = "megatoken serve runs/mine --port 8000"
LOOPBACK = ["127.0.0.1", "::1", "localhost"]


def run(options: Namespace, console: Console) -> Data:
    from megatoken.base.system.device import memory_errors

    with memory_errors("serve", "use --precision bf16 or --device cpu, or lower --parallel"):
        return serve(options, console)


def serve(options: Namespace, console: Console) -> Data:
    """Serve until SIGTERM or Ctrl-C, then finish the answers in progress.

    A second Ctrl-C cuts them off. Raises ConfigError if an option is out of range, if the port is
    in use, or if other machines could connect without a key.
    """
    http = import_extra("megatoken.inference.http_server", "serve")
    from megatoken.inference.app import MORE_CONNECTIONS, build_app
    from megatoken.inference.engine import Engine
    from megatoken.inference.kv_cache import token_bytes
    from megatoken.inference.open_model import open_model
    from megatoken.inference.protocol import ServedModel
    from megatoken.text.chat_template import find_template

    check_options(options)
    loaded, device = open_model(options, console.warn)
    name = Path(options.model).resolve().name if Path(options.model).exists() else options.model
    template = None
    no_template = ""
    try:
        template = find_template(loaded.tokenizer)
    except ConfigError as error:
        no_template = str(error)
        console.warn(no_template)
    bytes_per_token = token_bytes(loaded.model.config, device.dtype)
    context = loaded.model.config.seq_len
    most = options.parallel * context
    free = device.memory_bytes(1) // (4 * bytes_per_token) or most
    cache_tokens = options.cache_tokens or max(1, min(free, most))
    context = min(context, cache_tokens)
    served = ServedModel(name, context, loaded.tokenizer, template, no_template)
    # Any other address needs a key, which the page of another site (DNS rebinding) does not have.
    hosts = [*http.LOCAL_HOSTS, *options.allow_host] if options.host in LOOPBACK else ["*"]
    with (
        http.listen(options.host, options.port) as listener,
        Engine(
            loaded.model,
            device,
            rows=options.parallel,
            waiting=options.queue,
            cache_tokens=cache_tokens,
        ) as engine,
    ):
        app = build_app(engine, served, hosts, options.api_key or "")
        server = http.build_server(app, engine.max_jobs + MORE_CONNECTIONS)
        address = http.format_address(options.host, listener)
        size = format_memory(cache_tokens * bytes_per_token)
        cache = f"KV cache of up to {cache_tokens:,} tokens ({size})"
        console.print(
            f"{loaded.source}: page at {address}/, API at {address}/v1, {cache}; stop with Ctrl-C"
        )
        # Before and after its own handlers: uvicorn raises the signals that stopped it again.
        with handle_signals(("SIGTERM", "SIGINT"), server.handle_exit):
            server.run([listener])
    return {"model": loaded.source, "address": address}


def check_options(options: Namespace) -> None:
    """Raise ConfigError for options out of range."""
    if options.host not in LOOPBACK and not options.api_key:
        what = f"--host {options.host} opens the server to other machines"
        raise ConfigError(what, fix="set --api-key")
    limits = (
        *(("port", 0, 65_535), ("parallel", 1, 1024), ("queue", 0, 65_536)),
        ("cache_tokens", 1, 2**40),
    )
    for name, low, high in limits:
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            name = name.replace("_", "-")
            raise ConfigError(f"--{name} is {value}", fix=f"use {low:,} to {high:,}")
