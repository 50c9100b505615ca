"""Translate YAML files of MosaicML's Composer and llm-foundry.

Source: the GPT files of composer/yamls/models (2022) and llm-foundry's scripts/train/yamls.

At each step, Composer's DecoupledAdamW multiplies a weight by 1 - wd lr(t)/lr, but megatoken's
AdamW multiplies it by 1 - wd lr(t). A weight decay of wd is therefore translated to wd/lr.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import yaml

from megatoken.base.config.load import NULL, Assignment, compose_yaml
from megatoken.base.errors import ConfigError
from megatoken.base.system.table import read_table
from megatoken.convert.recipes.translation import Functions, Translation

OPTION = "FILE", "YAML of Composer or llm-foundry"
TABLE = read_table(__file__)
BUDGETS = {"ba": "budget.steps", "ep": "budget.epochs", "tok": "budget.tokens"}
# Other spellings of a key (wrapper sections, lists of one entry), and what replaces them.
RENAMED = (
    (r"^model\.(gpt2\.)?(model_config|config_overrides)\.", "model."),
    (r"^(optimizer|scheduler)s?\.(0\.)?", r"\1."),
    (r"^deepspeed(_config)?\.", "deepspeed."),
    (r"^train_(dataset|loader)\.(.+\.)?max_seq_len$", "train_dataset.max_seq_len"),
)
LONGEST_VALUE = 1000  # characters


def duration(text: str, default_unit: str = "", units: str = "ba|ep|tok|dur") -> str:
    """Convert a training length such as 100ba to one of megatoken, such as 100.0steps.

    Raises ValueError for other text or a unit that is not in `units`.
    """
    if text.isdecimal():
        text += default_unit
    match = re.fullmatch(f"([\\d._e+-]+)({units})", text)
    if not match:
        raise ValueError
    return f"{float(match[1])}{match[2].replace('ba', 'steps')}"


def schedule(name: str) -> str:
    """Convert the name of a schedule such as cosine_decay_with_warmup to megatoken's.

    Raises ValueError for an unknown one.
    """
    match = re.fullmatch("(cosine|linear|constant)(_decay)?(_with_warmup)?", name)
    if not match:
        raise ValueError
    return match[1]


FUNCTIONS: Functions = {
    "clip": partial(max, 0.0),
    "schedule": schedule,
    "duration": duration,
    "epochs": partial(duration, default_unit="ep"),
    "batches": partial(duration, default_unit="ba"),
    "length": partial(duration, units="ba|ep|tok"),
}


def translate(file: str, processes: int = 1) -> Translation:
    """Translate a Composer or llm-foundry file.

    Raises ConfigError, naming file:line, for what cannot be translated.
    """
    path = Path(file)
    settings = _read(path)
    _add_optimizer_defaults(settings, TABLE["optimizers"])
    written = [
        setting
        for setting in settings.values()
        if setting.text or setting.key.startswith(("algorithms.", "callbacks."))
    ]
    translation = Translation("Composer", TABLE, written, FUNCTIONS)
    get = translation.get
    required = [*TABLE["required"]]
    if "warmup" in (get("scheduler.name") or ""):
        required.append("scheduler.t_warmup")
        translation.notes.append("warm-up starts at lr/steps instead of 0")
    missing = [key for key in required if get(key) is None]
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}", path)
    translation.name = get("run_name") or f"composer-{path.stem}"
    if get("model.expansion_ratio"):
        d_ff = int(get("model.expansion_ratio") * get("model.n_embd"))
        translation.set("model.d_ff", d_ff, "model.expansion_ratio")
    _set_weight_decay(translation)
    _set_budget(translation, settings)
    keep = get("save_num_checkpoints_to_keep")
    if keep and keep > 0:  # -1 keeps all
        translation.set("save.keep_last", keep, "save_num_checkpoints_to_keep")
        translation.assignments.pop("save.keep_every", None)
    return translation


def _add_optimizer_defaults(
    settings: dict[str, Assignment], optimizers: Mapping[str, Mapping[str, float]]
) -> None:
    """Add the optimizer's defaults to `settings`, in place.

    First rewrites a section such as {adamw: {lr: 1}} as {name: adamw, lr: 1}.
    """
    for section in ("optimizer", "scheduler"):
        keys = [key for key in settings if key.startswith(f"{section}.")]
        if keys and f"{section}.name" not in keys:
            name = keys[0].split(".")[1]
            where = settings[keys[0]].where
            settings[f"{section}.name"] = Assignment(f"{section}.name", name, where)
            for key in keys:
                setting = settings.pop(key)
                key = key.replace(f".{name}", "", 1)
                settings[key] = Assignment(key, setting.text, setting.where)
    optimizer = settings.get("optimizer.name")
    if optimizer:
        for name, default in optimizers.get(optimizer.text, {}).items():
            key = f"optimizer.{name}"
            settings.setdefault(key, Assignment(key, str(default), optimizer.where))


def _set_weight_decay(translation: Translation) -> None:
    decay = translation.get("optimizer.weight_decay")
    lr = translation.get("optimizer.lr")
    if not decay:
        return
    if translation.get("optimizer.name") == "decoupled_adamw":
        translation.set("optim.weight_decay", decay / lr, "optimizer.weight_decay")
        translation.notes.append(f"decoupled_adamw scales decay by 1/lr: wd = {decay} / {lr}")
    translation.notes.append("norms and biases are not decayed; Composer decays all parameters")


def _set_budget(translation: Translation, settings: Mapping[str, Assignment]) -> None:
    get = translation.get
    seq_len = get("model.n_positions")
    length = re.fullmatch("(.+?)([a-z]+)", get("max_duration"))
    assert length is not None
    amount = float(length[1])
    unit = length[2]
    sizes = r"train_(dataset|loader)\..*(samples|num_tokens|epoch_size)"
    cuts = [setting for key, setting in settings.items() if re.fullmatch(sizes, key)]
    if unit == "ep" and cuts:  # the file sets the size of an epoch
        cut = cuts[-1]
        if len(cuts) > 1 or not cut.text.isdecimal():
            raise translation.refuse(cut, "write max_duration in tok or ba")
        size = 1 if cut.key.endswith("num_tokens") else seq_len
        amount = round(amount * int(cut.text) * size)
        unit = "tok"
    elif unit == "ep":
        translation.notes.append("epochs are of your dataset")
    translation.set(BUDGETS[unit], amount, "max_duration")


def _read(path: Path) -> dict[str, Assignment]:
    """Return the file's values by dotted key, with list entries numbered and `${name}` replaced."""
    root = compose_yaml(path)
    leaves = list(_list_leaves(root, path, "")) if root else []
    texts = {leaf.key: leaf.text for leaf in leaves}

    def look_up(match: re.Match[str]) -> str:
        return texts.get(match[1], texts.get(f"variables.{match[1]}", match[0]))

    settings: dict[str, Assignment] = {}
    for leaf in leaves:
        key = leaf.key
        text = leaf.text
        for pattern, name in RENAMED:
            key = re.sub(pattern, name, key)
        if key in settings:
            raise ConfigError(f"duplicate key {key}", leaf.where)
        for _ in range(4):  # references may be nested
            text = re.sub(r"\$\{([\w.]+)\}", look_up, text)[:LONGEST_VALUE]
        if "${" in text:
            raise ConfigError(f"{text} is not defined in the file", leaf.where)
        settings[key] = Assignment(key, text, leaf.where)
    return settings


def _list_leaves(node: yaml.Node, path: Path, key: str) -> Iterator[Assignment]:
    if isinstance(node, yaml.ScalarNode) or not node.value:
        text = "" if node.tag == NULL else node.value or ""
        yield Assignment(key, text, f"{path}:{node.start_mark.line + 1}")
        return
    if isinstance(node, yaml.MappingNode):
        entries = [(str(name.value), value) for name, value in node.value]
    else:
        entries = [(str(index), value) for index, value in enumerate(node.value)]
    for name, value in entries:
        yield from _list_leaves(value, path, f"{key}.{name}" if key else name)
