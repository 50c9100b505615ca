"""Open the model that a command line names, to generate text with it."""

from argparse import Namespace

from megatoken.base.config.schema import MachineConfig
from megatoken.base.errors import Warn
from megatoken.base.system.device import Device, open_device
from megatoken.inference.generate import prepare_decoding
from megatoken.text.load_pretrained import LoadedModel, load_pretrained


def open_model(options: Namespace, warn: Warn, *, int8: bool = False) -> tuple[LoadedModel, Device]:
    """Load the model on the device of --device, prepared for decoding; return both.

    warn: as in `load_pretrained`. int8: as in `prepare_decoding`.
    """
    loaded = load_pretrained(options.model, warn)
    device = open_device(MachineConfig(device=options.device, precision=options.precision))
    prepare_decoding(loaded.model.to(device.torch_device), device, int8=int8)
    return loaded, device
