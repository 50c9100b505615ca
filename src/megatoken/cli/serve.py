"""`megatoken serve`: a model behind HTTP, by OpenAI's interface, with a page to talk on."""

import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatoken.config.schema import MachineConfig
from megatoken.convert.load_pretrained import LoadedModel, load_pretrained
from megatoken.data.chat_template import find_template
from megatoken.errors import ConfigError
from megatoken.launch.local import handle_signals
from megatoken.sampling.generate import prepare_decoding
from megatoken.serving.engine import Engine
from megatoken.serving.protocol import ServedModel
from megatoken.serving.server import LOOPBACK, Server
from megatoken.system.device import memory_errors, open_device

POLL_SECONDS = 0.1  # between looks whether a signal has come
GRACE_SECONDS = 10.0  # for answers that are on their way when the server is asked to stop


@memory_errors("serve", "use --precision bf16 or --device cpu, or lower --parallel")
def serve(options: Namespace) -> dict[str, Any]:
    """Answer until SIGTERM or Ctrl-C, then finish what is on its way; a second one ends it at once.

    Raises ConfigError for options out of range, a host that others reach without a key, and a port that is taken.
    """
    check_options(options)
    console = options.console
    loaded = load_pretrained(options.model, console.warn)
    device = open_device(MachineConfig(device=options.device, precision=options.precision))
    loaded.model.to(device.torch_device)
    prepare_decoding(loaded.model, device)
    served = describe_model(options.model, loaded)
    engine = Engine(loaded.model, device, rows=options.parallel, waiting=options.queue)
    signals: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        signals.append(number)

    with (
        open_server(engine, served, options) as server,
        engine,
        handle_signals(("SIGTERM", "SIGINT"), on_signal),
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{host}:{server.port}"
        console.print(
            f"{loaded.source}: {address}/ to talk, {address}/v1 for clients, until Ctrl-C"
        )
        if served.template is None:
            console.warn(served.without_template)
        # Not a lock's wait without end: a signal that comes just before it sleeps would not wake it.
        while not signals:
            time.sleep(POLL_SECONDS)
        console.print("stopping: answers on their way are finished")
        for _ in range(round(GRACE_SECONDS / POLL_SECONDS)):
            if server.finish_answers(POLL_SECONDS) or len(signals) > 1:
                break
        server.shutdown()
    return {"model": loaded.source, "address": address}


def check_options(options: Namespace) -> None:
    """Raise ConfigError for options that cannot be."""
    if options.host not in LOOPBACK and not options.api_key:
        what = f"--host {options.host} opens the server to other machines"
        raise ConfigError(
            what, "megatoken serve", "give --api-key, which clients must send, or leave --host out"
        )
    if options.api_key is not None and not (
        options.api_key.isascii() and options.api_key.isprintable()
    ):
        raise ConfigError(
            "the API key holds signs that no header can", "--api-key", "use letters and digits"
        )
    if options.api_key is not None and (not options.api_key or " " in options.api_key):
        raise ConfigError(
            "the API key is empty or holds spaces", "--api-key", "use letters and digits"
        )
    for name, least, most in (("port", 0, 65_535), ("parallel", 1, 1024), ("queue", 0, 65_536)):
        if not least <= getattr(options, name) <= most:
            raise ConfigError(
                f"--{name} is {getattr(options, name)}", f"--{name}", f"give {least:,} to {most:,}"
            )


def describe_model(name: str, loaded: LoadedModel) -> ServedModel:
    """What clients are told: of a local model the folder's name, of another one the name on the hub."""
    shown, context = (
        Path(name).resolve().name if Path(name).exists() else name,
        loaded.model.config.seq_len,
    )
    try:
        return ServedModel(shown, context, loaded.tokenizer, find_template(loaded.tokenizer))
    except ConfigError as error:
        return ServedModel(shown, context, loaded.tokenizer, None, str(error))


def open_server(engine: Engine, served: ServedModel, options: Namespace) -> Server:
    """A server that listens. Raises ConfigError where it cannot."""
    try:
        return Server(engine, served, options.host, options.port, options.api_key or "")
    except (OSError, UnicodeError) as error:
        what = f"cannot listen: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(
            what, f"{options.host}, port {options.port}", "choose another --port or --host"
        ) from None
